"""The server for administrators, next to the public one: it acts on all frontends and engines."""

from aiohttp import web

from frontend import keys
from frontend.http.expect import expect_middleware
from frontend.routes import admin, health, info, profile
from frontend.routes.errors import add_request_id, error_middleware

__all__ = ["create_admin_app"]

_ROUTES = (admin.routes, profile.routes, health.routes, info.routes)


def create_admin_app(public: web.Application) -> web.Application:
    """The application of the administration of a server, with the objects of its application `public`."""
    app = web.Application(middlewares=[error_middleware, admin.admin_access, expect_middleware])
    for key in public:
        app[key] = public[key]
    app[keys.IS_ADMIN] = True
    for table in _ROUTES:
        app.add_routes(table)
    app.on_response_prepare.append(add_request_id)
    return app
