"""Why something does not run on ONNX Runtime, or not as it was asked for."""

import enum
from dataclasses import dataclass


class ReasonType(enum.Enum):
    """Why something runs in torch and not on ONNX Runtime."""

    NO_CONVERTER = "no converter"
    BETTER_IN_TORCH = "better in torch"
    UNSUPPORTED_ARGUMENTS = "unsupported arguments"
    DTYPE = "dtype"
    NO_KERNEL = "no kernel in this onnxruntime"
    DYNAMIC_SHAPE = "dynamic shape"
    RANDOM = "random op stays with torch's generator"
    DEVICE = "device without a provider"
    USER = "listed in torch_ops"
    TOO_SMALL = "region too small"
    SLOWER = "slower than torch"
    STATIC_RULE = "static rule of deterministic mode"
    GIVEN_ITERATOR = "is given an iterator"
    NO_EFFECT = "has no effect"
    CONVERSION_FAILED = "conversion failed"
    CHECKER_FAILED = "ONNX checker failed"
    SESSION_FAILED = "session could not be built"
    RUN_FAILED = "run failed"
    MISMATCH = "differs from eager"
    RUNTIME_UNAVAILABLE = "onnxruntime unavailable"
    CAPTURE_FAILED = "capture failed"
    INDUCTOR_FAILED = "torch.compile failed"
    RECOMPILING = "kept recompiling"
    GRAPH_BREAK = "graph ends early"
    ALREADY_COMPILED = "compiled by the user"
    CAPTURE_OFF = "steps are not captured"
    ENVIRONMENT = "set by the environment"
    BUDGET = "compile budget used up"
    NOT_COMPILED = "not compiled"
    NOT_TRIED = "not tried"
    NOT_AUDITED = "not audited enough"
    INDUCTOR_WON = "compiled by torch.compile"
    NOT_RECORDED = "not recorded"
    SPLIT = "not one graph"
    SECOND_GRADIENT = "takes gradients itself"
    HOOKED_RESULT = "a result has a hook of its gradient"
    SEPARATE_GRADIENTS = "its results may be differentiated one after the other"
    EARLIER_STEP = "a value with gradients was kept from an earlier step"
    OPEN = "captured as torch.compile does it, which may miss a change of what the step reads"
    PYTHON_STATE = "a graph would do it too late or otherwise"
    WRITES_TO_INPUT = "it writes to an input as only eager does"
    NOT_TIMED = "could not be timed"
    ADVICE = "unused"

    @property
    def is_failure(self) -> bool:
        """Whether this is a failure (counted as a fallback) and not a choice or a known limit."""
        return self in _FAILURES


_FAILURES = {
    ReasonType.CONVERSION_FAILED,
    ReasonType.CHECKER_FAILED,
    ReasonType.SESSION_FAILED,
    ReasonType.RUN_FAILED,
    ReasonType.MISMATCH,
    ReasonType.RUNTIME_UNAVAILABLE,
    ReasonType.CAPTURE_FAILED,
    ReasonType.RECOMPILING,
}


@dataclass(frozen=True)
class Reason:
    """Why a node, a region or a step runs in torch."""

    type: ReasonType
    text: str = ""  # details for the reader

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", " ".join(self.text.split()))  # one line

    def __str__(self) -> str:
        return f"{self.type.value}: {self.text}" if self.text else self.type.value
