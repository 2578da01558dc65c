import collections
import dataclasses
import re

import pytest

from lightning_ort import ORTConfig
from lightning_ort.config import DebugSettings


def test_defaults_are_valid_and_frozen():
    config = ORTConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.placement = "always"


def test_parse_takes_a_config_a_mapping_or_nothing():
    config = ORTConfig(placement="always")
    assert ORTConfig.parse(config) is config
    assert ORTConfig.parse({"placement": "always"}) == config
    assert ORTConfig.parse(None) == ORTConfig()


def test_parse_keeps_lists_from_yaml_as_tuples():
    config = ORTConfig.parse({"debug": {"torch_ops": ["aten.gelu"], "providers": ["CPUExecutionProvider"]}})
    assert config.debug.torch_ops == ("aten.gelu",)
    assert config.debug.providers == ("CPUExecutionProvider",)
    other = collections.UserList(["aten.gelu"])  # as OmegaConf has them
    assert ORTConfig.parse({"debug": {"torch_ops": other}}).debug.torch_ops == ("aten.gelu",)


def test_off_in_yaml_is_false():
    from jsonargparse import ArgumentParser

    assert ORTConfig.parse({"audit": False}) == ORTConfig(audit="off")
    parser = ArgumentParser()
    parser.add_class_arguments(ORTConfig, "config")
    settings = parser.parse_object({"config": {"audit": False}})
    assert parser.instantiate_classes(settings).config.audit == "off"


@pytest.mark.parametrize("off", ["off", False])
def test_an_engine_that_is_off_is_called_torch(off):
    with pytest.raises(ValueError, match="engine='torch' compiles nothing"):
        ORTConfig(engine=off)


def test_users_have_few_settings_to_choose_from():
    assert len(dataclasses.fields(ORTConfig)) <= 12


PATHS = ({"cache_dir": "a"}, {"report": "report.json"}, {"debug": {"save_onnx_dir": "a"}})
# what decides whether and when something is compiled or said, not what it comes to
OTHERS = (
    *({"start": "now"}, {"compile_budget": 0.5}, {"fallback": "raise"}, {"audit": "off"}),
    {"debug": {"trainer_loop": "stock"}},
)
# what changes the time of a step; of them, what changes what is decided of a graph; of them, a region alone
OF_REGIONS = ({"debug": {"kernels": "standard"}}, {"debug": {"intra_op_threads": 3}})
OF_GRAPHS = (
    *({"placement": "always"}, {"activation_memory_budget": 0.5}, {"debug": {"torch_ops": ["aten.gelu"]}}),
    *({"debug": {"min_region_nodes": 5}}, {"debug": {"providers": ["CPUExecutionProvider"]}}),
)
OF_STEPS = (
    *({"engine": "ort"}, {"dynamic": True}, {"dropout_masks": "fast"}, {"debug": {"capture": "modules"}}),
    *({"debug": {"step_graph": "split"}}, {"debug": {"check_against_eager": True}}),
)


@pytest.mark.parametrize(
    ("settings", "apart"),
    [
        *[(each, []) for each in (*PATHS, *OTHERS)],
        *[(each, ["steps"]) for each in OF_STEPS],
        *[(each, ["graphs", "steps"]) for each in OF_GRAPHS],
        *[(each, ["regions", "graphs", "steps"]) for each in OF_REGIONS],
    ],
)
def test_runs_share_what_they_found_unless_a_setting_changes_it(settings, apart, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, other = ORTConfig(), ORTConfig(**settings)
    assert [found for found in ("regions", "graphs", "steps") if one.key(found) != other.key(found)] == apart


def test_each_setting_says_what_it_changes():
    cases = (*PATHS, *OTHERS, *OF_REGIONS, *OF_GRAPHS, *OF_STEPS)
    tried = {name for case in cases for name in {**case, **case.get("debug", {})}}
    assert tried == {each.name for kind in (ORTConfig, type(ORTConfig().debug)) for each in dataclasses.fields(kind)}


def test_unknown_key_names_the_closest_field():
    with pytest.raises(ValueError, match=re.escape("no field 'placment': did you mean 'placement'?")):
        ORTConfig.parse({"placment": "always"})


def test_unknown_key_with_nothing_close_lists_the_fields():
    with pytest.raises(ValueError, match="the fields are engine, placement"):
        ORTConfig.parse({"xyzzy": 1})


@pytest.mark.parametrize("kind", [ORTConfig, DebugSettings])
def test_settings_without_a_name_are_refused_with_the_names(kind):
    last = dataclasses.fields(kind)[-1].name
    with pytest.raises(TypeError, match=rf"{kind.__name__} .* by name; got 'always'.*{last}"):
        kind("always")


def test_parse_refuses_what_is_no_mapping():
    with pytest.raises(TypeError, match="pass an ORTConfig, a mapping"):
        ORTConfig.parse("always")


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("placement", "sometimes", ValueError, "choose one of 'measured', 'always'"),
        ("start", "later", ValueError, "choose one of 'amortized', 'now'"),
        ("compile_budget", 0, ValueError, "must be above 0 and at most 1"),
        ("compile_budget", 1.5, ValueError, "must be above 0 and at most 1"),
        ("compile_budget", True, TypeError, "pass a number above 0 and at most 1"),
        ("compile_budget", "5%", TypeError, "pass a number above 0 and at most 1"),
        ("fallback", "ignore", ValueError, "choose one of 'warn', 'raise'"),
        ("dynamic", 1, ValueError, "choose one of True, False, None"),
        ("cache_dir", 3, TypeError, "pass a path or None"),
    ],
)
def test_bad_values_are_refused(field, value, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ORTConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("kernels", "all", ValueError, "choose one of 'auto', 'training', 'standard'"),
        ("capture", "graph", ValueError, "choose one of 'auto', 'step', 'modules'"),
        ("check_against_eager", "yes", ValueError, "choose one of True, False"),
        ("torch_ops", "aten.gelu", TypeError, "pass a list of strings"),
        ("torch_ops", None, TypeError, "pass a list of ATen op names"),
        ("providers", [1], TypeError, "pass a list of strings"),
        ("min_region_nodes", 0, ValueError, "must be at least 1"),
        ("min_region_nodes", None, TypeError, "pass an integer"),
        ("intra_op_threads", 0, ValueError, "must be at least 1"),
        ("intra_op_threads", True, TypeError, "pass an integer"),
    ],
)
def test_bad_values_for_finding_faults_are_refused(field, value, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ORTConfig(debug={field: value})


def test_keys_are_strings():
    with pytest.raises(TypeError, match="pass a mapping with fields of DebugSettings"):
        ORTConfig(debug={1: 2})


def test_paths_become_strings(tmp_path, monkeypatch):
    assert ORTConfig(cache_dir=tmp_path).cache_dir == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = ORTConfig(cache_dir="~/cache", report="~/run.json", debug={"save_onnx_dir": "~"})
    found = (config.cache_dir, config.report, config.debug.save_onnx_dir)
    assert found == (f"{tmp_path}/cache", f"{tmp_path}/run.json", str(tmp_path))


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID"])
def test_a_report_need_not_be_written_where_another_process_writes_it(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert ORTConfig(report="/proc/x/run.json").report == "/proc/x/run.json"
    monkeypatch.setenv(variable, "0")
    with pytest.raises(ValueError, match="report="):
        ORTConfig(report="/proc/x/run.json")
