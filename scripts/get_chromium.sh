#!/bin/sh
# Unpack Debian's headless Chromium, with the libraries that this machine lacks, into a folder. It installs nothing.
#
#     scripts/get_chromium.sh FOLDER
set -eu

rm -rf "$1"
mkdir -p "$1"
cd "$1"
folder=$(pwd)

download() {
    lacking=$(apt-get install --simulate --no-install-recommends chromium-headless-shell | awk '$1 == "Inst" {print $2}')
    # shellcheck disable=SC2086  # one word for each package
    apt-get download -qq chromium-common chromium-headless-shell $lacking
}

download || { apt-get update -qq && download; }
for package in *.deb; do dpkg -x "$package" .; done
rm ./*.deb

libraries=$folder/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH 2> /dev/null || echo x86_64-linux-gnu)
cat > chromium-headless-shell << END
#!/bin/sh
exec env LD_LIBRARY_PATH=$libraries:$libraries/pulseaudio $folder/usr/lib/chromium/chromium-headless-shell "\$@"
END
chmod +x chromium-headless-shell
./chromium-headless-shell --version
