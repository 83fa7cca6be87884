"""Wrapped methods of classes, functions and instances."""

import pickle

import pytest

from hf_lowprec.wrapped_method import temporarily_wrapped, wrap_method
from tests.support.processes import forkserver


class Base:
    def greet(self, name: str) -> str:
        """Greets."""
        return f"hello {name}"


class Derived(Base):
    def greet(self, name: str) -> str:
        return super().greet(name) + "!"


def louder(original, instance, name):
    return original(instance, name.upper())


def twice(original, instance, name):
    return original(instance, name) * 2


@pytest.fixture(params=[Base, Derived])
def instance(request):
    return request.param()


def end(instance: Base) -> str:
    return "!" if isinstance(instance, Derived) else ""


def test_a_wrapper_gets_the_instance(instance):
    found = []
    wrap_method(instance, "greet", lambda original, *args: found.append(args))
    instance.greet("you")
    assert found == [(instance, "you")]


def test_later_wrappers_are_outside_earlier_ones(instance):
    wrap_method(instance, "greet", louder)
    wrap_method(instance, "greet", twice)
    assert instance.greet("you") == f"hello YOU{end(instance)}" * 2


def test_a_method_that_calls_its_base_class_runs_the_wrapper_once():
    base, derived = Base(), Derived()
    wrap_method(base, "greet", twice)
    wrap_method(derived, "greet", twice)
    assert derived.greet("you") == "hello you!" * 2


def test_a_method_of_a_base_class_is_wrapped_where_overrides_call_it():
    instance = Derived()
    wrap_method(instance, "greet", twice, Base)
    assert instance.greet("you") == "hello youhello you!"
    assert Derived().greet("you") == "hello you!"


def test_other_instances_keep_their_method(instance):
    other = type(instance)()
    wrap_method(instance, "greet", louder)
    assert other.greet("you") == f"hello you{end(other)}"


def test_an_instance_that_nothing_else_refers_to():
    def made() -> Base:
        instance = Base()
        wrap_method(instance, "greet", louder)
        return instance

    assert made().greet("you") == "hello YOU"


def test_a_method_replaced_on_the_instance_is_wrapped(instance):
    instance.greet = lambda name: f"goodbye {name}"
    with temporarily_wrapped(instance, "greet", louder):
        assert instance.greet("you") == "goodbye YOU"
    assert instance.greet("you") == "goodbye you"
    wrap_method(instance, "greet", louder)
    wrap_method(instance, "greet", twice)
    assert instance.greet("you") == "goodbye YOU" * 2


def test_a_wrapper_for_a_while_leaves_the_earlier_ones(instance):
    attributes = dict(vars(instance))
    with temporarily_wrapped(instance, "greet", louder):
        assert "YOU" in instance.greet("you")
    assert vars(instance) == attributes
    wrap_method(instance, "greet", twice)
    with temporarily_wrapped(instance, "greet", louder):
        assert instance.greet("you") == f"hello YOU{end(instance)}" * 2
    assert instance.greet("you") == f"hello you{end(instance)}" * 2


def test_it_is_wrapped_in_another_process(tmp_path):
    """As for the workers of a hyperparameter search, which unpickle a Trainer."""
    instance = Derived()
    wrap_method(instance, "greet", louder)
    file = tmp_path / "instance"
    file.write_bytes(pickle.dumps(instance))
    script = tmp_path / "script.py"
    script.write_text(f"import pickle; print(pickle.load(open({str(file)!r}, 'rb')).greet('you'))")
    done = forkserver.run(script, [], timeout=240)
    assert done.stdout == "hello YOU!\n", done.stderr


def test_class_and_static_methods_stay_what_they_are():
    class Made:
        @classmethod
        def of(cls, name):
            return cls.__name__, name

        @staticmethod
        def plain(name):
            return name

    with (
        temporarily_wrapped(Made, "of", lambda original, cls, name: original(cls, name.upper())),
        temporarily_wrapped(Made, "plain", lambda original, name: original(name.upper())),
    ):
        assert Made.of("you") == Made().of("you") == ("Made", "YOU")
        assert Made.plain("you") == Made().plain("you") == "YOU"
    assert Made.of("you") == ("Made", "you")
    assert Made.plain("you") == "you"
