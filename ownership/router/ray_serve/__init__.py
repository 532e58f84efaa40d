"""The router inside Ray Serve: a `RequestRouter` class that places by the same policy and view.

Ray sends the requests; each process that routes for a deployment has an instance of the class.

- `router` is the class, `ownership.router.ray_serve.router:OwnerRouter`: the only module that
  imports Ray.
- `placing` gives each request one replica, and counts it until Ray tells of its end.
- `replicas` are the replicas as workers: what they have told through Ray answers the router's
  questions, which elsewhere go to workers by HTTP.
- `asked` reads a request as Ray has it.
"""
