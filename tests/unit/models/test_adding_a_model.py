"""docs/adding-a-model.md, done as it says."""

import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from closeness import assert_close
from tables import table

from pentad.core.errors import UserError
from pentad.models import families
from pentad.models.decoder import causal_attend
from pentad.models.registry import load_model
from pentad_tools.models.model_commands import run_new_model
from pentad_tools.models.skeleton import draft
from pentad_tools.models.verify import subject_of, verify, verify_subject

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "adding-a-model.md").read_text() + (DOCS / "model-families.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(families, "REGISTERED", {})
    families._load.cache_clear()
    yield tmp_path
    families._load.cache_clear()


def test_the_page_works_as_written(folder, capsys):
    text, adapter, use = BLOCKS
    run_new_model("phi3", "my_phi3.py", plain=True)
    assert capsys.readouterr().out.splitlines() == [
        "my_phi3.py: 12 rules",
        "Next: pentad verify-model my_phi3.py",
    ]
    assert (folder / "my_phi3.py").read_text() == text
    (fault,) = [o for o in verify("my_phi3.py").outcomes if not o.passed]
    said = f"{fault.check}, {fault.case}: {fault.detail}"
    (promised,) = re.findall(r"prints:?\n\n```text\n(.*)\n```", PAGE)
    number = r"\d\.\de[+-]\d+"
    assert re.sub(number, "#", said) == re.sub(number, "#", promised)

    imported, function = adapter.split("\n\n\n", 1)
    text = text.replace("from typing", f"{imported}\nfrom typing", 1)
    text = re.sub(r"def read_dims.*?\n\n\n", lambda _: f"{function}\n\n", text, flags=re.DOTALL)
    (folder / "my_phi3.py").write_text(text)
    families._load.cache_clear()
    report = verify("my_phi3.py")
    assert report.passed, [outcome for outcome in report.outcomes if not outcome.passed]

    config = transformers.Phi3Config(
        vocab_size=99, hidden_size=24, intermediate_size=33, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=3, pad_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    theirs = transformers.Phi3ForCausalLM(config).eval()
    theirs.save_pretrained(folder / "hf")
    names = {"folder": folder / "hf"}
    exec(use, names)
    ids = torch.arange(9)
    hidden = names["model"](ids, torch.arange(9), causal_attend)
    assert_close(names["model"].logits(hidden), theirs(ids[None]).logits[0])


OWN_CLASS = '''"""A family of its own composition."""

from dataclasses import replace

from pentad.models.families import llama
from pentad.models.decoder import Decoder


class MyDecoder(Decoder):
    """Halves its hidden states."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) / 2


SPEC = replace(llama.SPEC, family="my_llama", model="my_file:MyDecoder")
'''


def test_a_file_may_name_a_class_of_its_own_as_the_page_says(folder):
    (named,) = re.findall(r'model="(my_file:\w+)"', PAGE)
    assert f'model="{named}"' in OWN_CLASS
    place = folder / "models"
    place.mkdir()
    (place / "my_file.py").write_text(OWN_CLASS)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=33, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(folder / "hf")
    ours = load_model(folder / "hf", model="models/my_file.py:SPEC")
    ids = torch.arange(9)
    assert_close(
        ours.logits(2 * ours(ids, torch.arange(9), causal_attend)), theirs(ids[None]).logits[0]
    )
    with pytest.raises(
        UserError, match=r"model = my_file:Other .of models/my_file.py:SPEC.: there"
    ):
        (place / "my_file.py").write_text(OWN_CLASS.replace(":MyDecoder", ":Other"))
        families._load.cache_clear()
        load_model(folder / "hf", model="models/my_file.py:SPEC")
    with pytest.raises(UserError, match=r"model = elsewhere:A .*cannot be imported .*ModuleNot"):
        (place / "my_file.py").write_text(OWN_CLASS.replace(named, "elsewhere:A"))
        families._load.cache_clear()
        load_model(folder / "hf", model="models/my_file.py:SPEC")
    with pytest.raises(UserError, match="model = my_file:llama: is .*not a subclass of"):
        (place / "my_file.py").write_text(OWN_CLASS.replace(named, "my_file:llama"))
        families._load.cache_clear()
        load_model(folder / "hf", model="models/my_file.py:SPEC")


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("gemma3", "describes a model with several modalities"),
        ("qwen3_5", "describes a model with several modalities"),
        ("longcat_flash", "model_type = longcat_flash: "),
        ("blt", "model_type = blt: "),
        ("musicgen", "model_type = musicgen: transformers has no config of it by default"),
        ("bamba", "model_type = bamba: "),
        ("bert", "model_type = bert: "),
    ],
)
def test_a_family_that_cannot_be_drafted_is_refused_at_once(folder, family, sentence):
    """Within the memory of a tiny model, not after building one of gigabytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=sentence):
        run_new_model(family, "mine.py")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB
    assert not (folder / "mine.py").exists()


def test_without_the_file_the_folder_is_refused(folder):
    transformers.CohereConfig(hidden_size=24).save_pretrained(folder)
    with pytest.raises(
        UserError, match="model_type = cohere: no such model family; use one of .*glm4, glm4_moe"
    ):
        load_model(folder)


@pytest.mark.parametrize("variant", table(["untied", "yarn rope", "all"], ["all"]))
@pytest.mark.parametrize("family", ["qwen3_moe", "mistral"])
def test_drafts_of_plain_families_pass_at_once(folder, family, variant):
    config = transformers.AutoConfig.for_model(family).to_dict()
    (folder / "drafted.py").write_text(draft(config))
    subject = subject_of("drafted.py")
    chosen = {name: keys for name, keys in subject.configs.items() if variant in (name, "all")}
    report = verify_subject(replace(subject, configs=chosen))
    assert chosen and report.outcomes
    assert report.passed, [outcome for outcome in report.outcomes if not outcome.passed]


def test_tensors_that_are_not_known_are_left_as_remarks():
    config = transformers.AutoConfig.for_model("olmo2").to_dict()
    text = draft(config, plain=True)
    assert "# no rule yet: model.layers.{i}.post_feedforward_layernorm.weight [60]" in text
    assert "replace(dims_from_hf({**DEFAULTS, **hf}), qk_norm=True)" in text


def test_a_draft_names_the_config_keys_that_it_does_not_read(folder, capsys):
    run_new_model("granite", "mine.py", plain=True)
    assert "4 config keys that are not read" in capsys.readouterr().out
    assert "\n# not read: residual_multiplier = 1.0\n" in (folder / "mine.py").read_text()


def test_a_family_without_a_scalar_model_in_transformers_keeps_its_value_head(folder):
    (folder / "mine.py").write_text(
        draft(transformers.AutoConfig.for_model("granite").to_dict(), plain=True)
    )
    heads = [o for o in verify("mine.py").outcomes if o.check == "value head"]
    assert heads and all(outcome.passed for outcome in heads)


def test_a_draft_says_what_keys_mean_that_a_config_leaves_out(folder):
    config = transformers.AutoConfig.for_model("phi3").to_dict()
    (folder / "drafted.py").write_text(draft(config, plain=True))
    config = {k: v for k, v in config.items() if k != "rms_norm_eps"}
    assert families.dims_of(config, "drafted.py:SPEC").norm_eps == 1e-5  # ours would be 1e-6


def test_a_draft_never_replaces_a_file(folder):
    (folder / "mine.py").write_text("work of days")
    with pytest.raises(UserError, match="--out = mine.py: exists, and"):
        run_new_model("qwen3", "mine.py")
    assert (folder / "mine.py").read_text() == "work of days"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no.such.module:SPEC", r"cannot be imported \(ModuleNotFoundError: No module named 'no"),
        ("broken.py:SPEC", r"cannot be imported \(SyntaxError: "),
        ("leaving.py:SPEC", r"cannot be imported \(SystemExit: 3 \(leaving.py, line 1: "),
        ("absent.py:SPEC", "cannot be imported"),
        ("pentad.models.spec:DECODER", "is a tuple, not a ModelSpec"),
        (
            "pentad.models.families.qwen3:SPECIAL",
            "there is no SPECIAL in pentad.models.families.qwen3",
        ),
    ],
)
def test_a_wrong_path_is_told(folder, path, sentence):
    (folder / "broken.py").write_text("def (:\n")
    (folder / "leaving.py").write_text("import sys; sys.exit(3)\n")
    with pytest.raises(UserError, match=f"model = {path}: {sentence}"):
        families.spec_of(path)
