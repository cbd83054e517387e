"""Results that several threads want: computed once, and waited for by whoever comes second."""

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def once(maxsize: int) -> Callable[[Function], Function]:
    """Decorator: `functools.lru_cache`, where a call that is under way already is waited for.

    A call that fails leaves nothing behind, and whoever waited for it computes again.
    """

    def decorate(function: Function) -> Function:
        cached = functools.lru_cache(maxsize=maxsize)(function)
        # Other arguments that share a lock wait for nothing, but for no longer than a call.
        locks = [threading.RLock() for _ in range(32)]

        def call(*args: Any, **kwargs: Any) -> Any:
            named = sorted(kwargs.items())  # in one order, or the cache would tell them apart
            with locks[hash((args, tuple(named))) % len(locks)]:
                return cached(*args, **dict(named))

        waiting: Any = functools.wraps(function)(call)
        waiting.cache_info, waiting.cache_clear = cached.cache_info, cached.cache_clear
        return cast(Function, waiting)

    return decorate
