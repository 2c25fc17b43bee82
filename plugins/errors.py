"""The exception tree. One error carries everything that any dialect needs to show it, and whether to try elsewhere.

GatewayError                     500  server_error
|- InvalidRequest                400  invalid_request_error
|  |- ContextLengthExceeded      400  context_length_exceeded
|  `- Unsupported                400  unsupported_parameter
|- AuthenticationFailed          401  invalid_api_key
|- PermissionDenied              403
|- NotFound                      404
|  `- ModelNotFound              404  model_not_found
|- MethodNotAllowed              405  method_not_supported
|- PayloadTooLarge               413
|- UnsupportedMediaType          415  unsupported_content_type
|- RateLimited                   429  rate_limit_exceeded
|- QuotaExceeded                 429  insufficient_quota
|- Overloaded                    503  the gateway or engine has no room: Retry-After is set
|- StoreUnavailable              503  the store is needed and does not answer
|- PluginFailed                  500  a hook failed or was late, and its on_error is "block"
`- UpstreamError                 502  a target failed: its own status where it answered with one
   |- UpstreamUnavailable        502  nothing listens, the connection broke, no usable answer
   `- UpstreamTimeout            504
"""

from __future__ import annotations

FALLBACK_STATUSES = frozenset({401, 403, 404, 408, 409, 425, 429})


class GatewayError(Exception):
    """Base of all errors that a client may see. `message` never holds a secret or a text of the upstream's host."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,  # noqa: A002  the field's name in every dialect
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = self.code if code is None else code
        self.type = self.type if type is None else type
        self.status = self.status if status is None else status
        self.retry_after_s = retry_after_s

    @property
    def retryable(self) -> bool:
        """True where another target may answer what this one could not."""
        return False


class InvalidRequest(GatewayError):
    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class Unsupported(InvalidRequest):
    code = "unsupported_parameter"


class AuthenticationFailed(GatewayError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class PermissionDenied(GatewayError):
    status = 403
    type = "invalid_request_error"


class NotFound(GatewayError):
    status = 404
    type = "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(GatewayError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_supported"


class PayloadTooLarge(GatewayError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMediaType(GatewayError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_content_type"


class RateLimited(GatewayError):
    status = 429
    type = "requests"
    code = "rate_limit_exceeded"


class QuotaExceeded(GatewayError):
    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"


class Overloaded(GatewayError):
    status = 503

    @property
    def retryable(self) -> bool:
        return True


class StoreUnavailable(GatewayError):
    status = 503


class PluginFailed(GatewayError):
    status = 500


class UpstreamError(GatewayError):
    """A target answered with an error. `status` is its own when it is a real error status, else 502."""

    status = 502

    @property
    def retryable(self) -> bool:
        return self.status >= 500 or self.status in FALLBACK_STATUSES


class UpstreamUnavailable(UpstreamError):
    code = "upstream_unavailable"


class UpstreamTimeout(UpstreamError):
    status = 504
    code = "upstream_timeout"
