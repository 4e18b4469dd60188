"""Models and documents of Hugging Face: random weights from a configuration, saved and read again; no network."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="no transformers here (pip install 'netfold[hf]')")
import torch
import torch.distributed as dist
from made import data
from ranks import run_ranks, values
from safetensors.torch import load_file
from torch.nn import functional

from netfold_train import Recipe, Trainer
from netfold_train.data.examples import BadExampleError
from netfold_train.data.sampler import Sampler
from netfold_train.models import make_model
from netfold_train.models.model import IGNORED
from netfold_train.recipe import Factory

VOCABULARY = 300


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        # Read when it was imported, perhaps by another test.
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama and a BERT with their tokenizer, documents in three formats, and labelled ones."""
    return filled(tmp_path_factory.mktemp("hf"))


def filled(folder: Path) -> Path:
    import datasets
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    datasets.config.HF_DATASETS_CACHE = str(folder / "cache")
    texts = [path.read_text()[:3000] for path in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))]
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<unk>", "<eos>", "<mask>", "<pad>"]
    raw.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", eos_token="<eos>", mask_token="<mask>", pad_token="<pad>"
    )
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **size)
    bert = transformers.BertConfig(vocab_size=len(tokenizer), hidden_dropout_prob=0.0, **size)
    transformers.LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    transformers.BertForMaskedLM(bert).save_pretrained(folder / "bert")
    for name in ("llama", "bert"):
        tokenizer.save_pretrained(folder / name)
    rows = [{"text": text, "label": "def" if text.count("def ") > 2 else "no"} for text in texts]
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, rows)))
    saved = datasets.Dataset.from_list(rows)
    saved.to_parquet(folder / "documents.parquet")
    saved.save_to_disk(folder / "saved")
    return folder


def model(folder: Path, **options: Any) -> Any:
    return make_model(Factory.model_validate({"name": f"hf:{folder}", **options}))


def test_a_run_begins_with_the_saved_weights(alone: None, folder: Path) -> None:
    import transformers

    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    head = {"rank": 2, "targets": ["q_proj"], "trained": ["lm_head"]}
    for options in ({}, {"lora": {"rank": 2}}, {"lora": head}, {"config": {"rms_norm_eps": 1e-6}}):
        asked = recipe(folder, training={"steps": 1}, model=options)
        trainer = Trainer(asked)
        numbers = Sampler(len(trainer.data.train), 0).indices(0, 8)
        batch = trainer.data.train.batch(numbers, numbers)
        expected = functional.cross_entropy(saved(**batch.named).logits.mT, batch.target)
        assert trainer.fit().losses[0] == pytest.approx(float(expected), rel=1e-5), options
    assert trainer.model.blocks == ("LlamaDecoderLayer",) and trainer.model.weights is not None
    assert trainer.model.weights.folder == folder / "llama"
    other = model(folder / "llama", pretrained=False, config={"num_hidden_layers": 1})
    assert len(other.module.model.layers) == 1


def test_documents_are_the_same_windows_in_every_format(folder: Path) -> None:
    kinds = [
        data("documents", train=str(folder / name), tokenizer=str(folder / "llama"), context=16)
        for name in ("documents.jsonl", "documents.parquet", "saved")
    ]
    batches = [each.train.batch([0, 5], [0, 0]) for each in kinds]
    for batch in batches:
        ids = batch.named["input_ids"]
        assert ids.shape == batch.target.shape == (2, 16)
        assert torch.equal(ids[:, 1:], batch.target[:, :-1])
        assert torch.equal(ids, batches[0].named["input_ids"])
    assert 0 < kinds[0].metric.baseline < 9
    assert len(kinds[0].held_out) == max(1, (len(kinds[0].train) + len(kinds[0].held_out)) // 100)


def test_masks_are_a_function_of_the_seed(folder: Path) -> None:
    made = data(
        "masked-documents", train=str(folder / "saved"), tokenizer=str(folder / "bert"), context=20, masked=0.2
    ).train
    one, again, other = (made.batch([3], [seed]) for seed in (7, 7, 8))
    assert torch.equal(one.target, again.target) and not torch.equal(one.target, other.target)
    assert int((one.target != IGNORED).sum()) == 4


def test_labelled_documents_are_padded_and_have_masks(folder: Path) -> None:
    path, tokenizer = str(folder / "saved"), str(folder / "bert")
    made = data("labelled-documents", train=path, held_out=path, tokenizer=tokenizer, context=12)
    batch = made.train.batch([0, 1], [0, 0])
    assert batch.named["input_ids"].shape == batch.named["attention_mask"].shape == (2, 12)
    logits = model(folder / "bert", task="sequence-classification", labels=2).module(**batch.named)
    assert logits.shape == (2, 2) and batch.target.max() <= 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train": "nowhere.jsonl"}, "nowhere.jsonl: no file"),
        ({"column": "words"}, "no column 'words'; its columns are"),
        ({"tokenizer": "nowhere"}, "data.tokenizer is 'nowhere'"),
        ({"context": 100000}, "data.context is 100000"),
    ],
)
def test_an_error_of_documents_names_what_is_wrong(folder: Path, options: dict[str, Any], said: str) -> None:
    asked = {"train": str(folder / "documents.jsonl"), "tokenizer": str(folder / "llama"), "context": 16, **options}
    with pytest.raises((ValueError, BadExampleError), match=said):
        data("documents", **asked)


def test_a_damaged_file_is_named(folder: Path) -> None:
    path = folder / "damaged.parquet"
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(BadExampleError, match=r"damaged\.parquet: "):
        data("documents", train=str(path), tokenizer=str(folder / "llama"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "no/where"}, "model.path is 'no/where'"),
        ({"config": {"hidden": 3}}, "model.config has 'hidden'"),
        ({"lora": {"targets": ["nothing"]}}, "model.lora: "),
        ({"lora": {"rank": 0}}, "model.lora"),
    ],
)
def test_an_error_of_a_model_names_what_is_wrong(folder: Path, options: dict[str, Any], said: str) -> None:
    pytest.importorskip("peft", reason="no peft here (pip install 'netfold[hf]')")
    with pytest.raises(ValueError, match=said):
        make_model(Factory.model_validate({"name": "hf", "path": str(folder / "llama"), **options}))


def recipe(folder: Path, name: str = "llama", **sections: Any) -> Recipe:
    data = {"name": "documents", "train": str(folder / "saved"), "tokenizer": str(folder / "llama"), "context": 16}
    table = {
        "model": {"name": f"hf:{folder / name}"},
        "data": data,
        "training": {"steps": 3, "batch": 8},
        "optimizer": {"name": "sgd", "lr": 0.1},
    }
    return Recipe.model_validate({**table, **{key: {**table.get(key, {}), **keys} for key, keys in sections.items()}})


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_adapters_are_trained_and_nothing_else(alone: None, folder: Path) -> None:
    pytest.importorskip("peft", reason="no peft here (pip install 'netfold[hf]')")
    trainer = Trainer(recipe(folder, model={"lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}))
    before = {name: each.detach().clone() for name, each in trainer.replica.named_parameters()}
    trainer.fit()
    saved, weights = load_file(folder / "llama" / "model.safetensors"), trainer.model.weights
    assert weights is not None
    before |= {name: saved[source] for name, source in weights.names.items()}
    moved = {name for name, each in trainer.replica.named_parameters() if not torch.equal(each, before[name])}
    assert moved and all("lora_" in name for name in moved)


def test_a_rank_reads_its_own_part_of_the_weights_beside_adapters(folder: Path) -> None:
    pytest.importorskip("peft", reason="no peft here (pip install 'netfold[hf]')")
    whole = (folder / "llama" / "model.safetensors").stat().st_size
    for options in ({}, {"lora": {"rank": 2}}):
        read = values(run_ranks(_bytes_read, 2, str(folder), options))
        # Both have the final norm's rows, and none has another's.
        assert all(0.4 * whole < each < 0.6 * whole for each in read), options
        assert sum(read) <= whole, options


def _bytes_read(rank: int, size: int, store: str, folder: str, options: dict[str, Any]) -> int:
    """Bytes of the weights' files that a rank asks for; transformers reads none."""
    import datasets
    import transformers
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    read_data, asked = HuggingFaceStorageReader.read_data, []

    def counted(self: Any, plan: Any, planner: Any) -> Any:
        asked.extend(4 * each.lengths.numel() for each in plan.items)
        return read_data(self, plan, planner)

    def whole(*_: Any, **__: Any) -> Any:
        raise AssertionError("transformers reads the whole model")

    torch.set_num_threads(1)
    datasets.config.HF_DATASETS_CACHE = f"{folder}/cache"
    dist.init_process_group("netfold", init_method=f"file://{store}/store", rank=rank, world_size=size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HuggingFaceStorageReader, "read_data", counted)
        patch.setattr(transformers.PreTrainedModel, "from_pretrained", whole)
        try:
            Trainer(recipe(Path(folder), parallel={"zero": 3}, training={"steps": 1}, model=options)).fit()
        finally:
            dist.destroy_process_group()
    return sum(asked)


def test_every_split_learns_the_same(folder: Path) -> None:
    splits: list[dict[str, Any]] = [
        {"parallel": {"data": 2}},
        {"parallel": {"data": 2, "zero": 3}},
        {"parallel": {"tensor": 2}},
        {"parallel": {"data": 2}, "training": {"steps": 3, "batch": 8, "accumulate": 2, "recompute": "all"}},
        {"parallel": {"data": 2}, "training": {"steps": 3, "batch": 8, "recompute": "selective"}},
    ]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = Trainer(recipe(folder)).fit().losses
    finally:
        dist.destroy_process_group()
    assert len(set(expected)) == len(expected)
    for losses in values(run_ranks(_losses, 2, str(folder), splits)):
        for split, found in zip(splits, losses, strict=True):
            assert found == pytest.approx(expected, rel=1e-5), split


def _losses(rank: int, size: int, store: str, folder: str, splits: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    import datasets

    torch.set_num_threads(1)
    datasets.config.HF_DATASETS_CACHE = f"{folder}/cache"
    dist.init_process_group("netfold", init_method=f"file://{store}/store", rank=rank, world_size=size)
    try:
        return [Trainer(recipe(Path(folder), **split)).fit().losses for split in splits]
    finally:
        dist.destroy_process_group()
