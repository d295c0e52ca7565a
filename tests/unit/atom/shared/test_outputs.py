"""Times and the dictionary of a finished sequence."""

from atom.shared.outputs import Sequence


def test_times_follow_from_the_marks() -> None:
    done = Sequence(1, [5, 6], [7, 8, 9], "abc", "eos", submitted=1.0, first_token=1.5, finished=2.5)
    assert done.as_dict() == {
        "text": "abc",
        "token_ids": [7, 8, 9],
        "latency": 1.5,
        "finish_reason": "eos",
        "num_tokens_input": 2,
        "num_tokens_output": 3,
        "ttft": 0.5,
        "tpot": 0.5,
    }


def test_one_token_has_no_time_between_tokens() -> None:
    assert Sequence(1, [5], [7], first_token=1.0, finished=1.0).tpot == 0.0


def test_log_probabilities_are_there_where_asked_for() -> None:
    assert not {"logprobs", "prompt_logprobs"} & Sequence(1, [5], [7]).as_dict().keys()
    done = Sequence(1, [5, 6], [7], logprobs=[{7: -0.5}], prompt_logprobs=[None, {6: -1.0}]).as_dict()
    assert (done["logprobs"], done["prompt_logprobs"]) == ([{7: -0.5}], [None, {6: -1.0}])
