# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""The schemas and profiles of the notebooks that this repository has."""

import json

import jsonschema
import pytest
from report_checkout import ROOT

from mla_kernels.report.errors import ReportError
from mla_kernels.report.parameters import convert, describe, load_profile, notebooks_in, settle


@pytest.mark.parametrize("notebook", notebooks_in(ROOT / "notebooks"), ids=lambda n: n.name)
def test_every_schema_agrees_with_its_parameters_cell(notebook):
    path = ROOT / "notebooks" / "params" / f"{notebook.name}.schema.json"
    schema = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) == set(notebook.defaults)
    jsonschema.validate(notebook.defaults, schema)
    for name, entry in schema["properties"].items():
        assert entry["description"].endswith("."), name
        assert describe(entry)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "03_layer_outputs.formats=[e5m2, e4m3_token]",
            "expected a list of one or more different values, each one of e4m3, e4m3_token, e4m3_group128, e5m2, "
            "with e4m3 among them, got '[e5m2, e4m3_token]'",
        ),
        ("03_layer_outputs.formats=[e4m3, e4m3]", "with e4m3 among them, got '[e4m3, e4m3]'"),
        (
            "04_error_at_length.promote_every=[64, 100]",
            "expected a list of 1 to 32 different integers from 32 to 131072, divisible by 32, got '[64, 100]': "
            "100 at [1] is not allowed",
        ),
        (
            "04_error_at_length.lengths=512,512",
            "expected a list of 1 to 32 different integers from 1 to 131072, got '512,512'",
        ),
        ("04_error_at_length.model_lengths=512,512", "different integers from 1 to 131072, got '512,512'"),
    ],
)
def test_what_a_notebook_needs_stands_in_its_schema_and_in_the_message(given, words):
    with pytest.raises(ReportError) as refused:
        settle(notebooks_in(ROOT / "notebooks"), {}, [given])
    assert words in str(refused.value)


@pytest.mark.parametrize("profile", ["smoke", "cpu", "h200"])
def test_every_profile_is_allowed_and_names_every_notebook(profile):
    folder = ROOT / "notebooks"
    there = notebooks_in(folder)
    listed = load_profile(profile, folder)
    assert list(listed) == [n.name for n in there]
    settle(there, listed, {}, folder)


def test_a_key_given_twice_in_a_mapping_is_refused():
    with pytest.raises(ReportError, match=r"x: expected a mapping, got '\{a: 1, a: 2\}'"):
        convert("{a: 1, a: 2}", {"type": "object"}, "x")
