"""A tiny model of ATOM in SGLang's pools and batches, without SGLang, whose modules are stand-ins."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from atom_ops.attention_backend import ATTENTION_BACKENDS
from tests.helpers.checkpoints.tiny_models import tiny, tiny_config
from tests.helpers.plugins.sglang_host import PLUGIN, Host, Mode, batch_of, install, make_pool
from workers.checkpoint.families import architectures

SLOTS = torch.tensor([[4, 5, 6, 7, 20, 21, 22, 23], [12, 13, 14, 15, 8, 9, 10, 11]], dtype=torch.int32)
IDS = torch.arange(3, 19).view(2, 8)


class Rig:
    """The model with its pool and its backend."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        dtype: torch.dtype = torch.float32,
        name: str = "qwen3-moe",
        attention: str = "atom",
    ):
        self.host = Host()
        self.host.args.load_format = "dummy"
        self.host.args.attention_backend = attention
        install(monkeypatch, self.host)
        row = tiny(name)
        settings = tiny_config(row).to_dict()
        architecture = architectures()[row.model_type][0]
        radix_layers = import_module(f"{PLUGIN}.radix_layers")
        monkeypatch.setitem(ATTENTION_BACKENDS, radix_layers.NAME, radix_layers.RadixBackend())
        names = import_module(f"{PLUGIN}.models.atom_models").EntryClass
        kind = next(each for each in names if each.__name__ == architecture)
        self.model = kind(SimpleNamespace(to_dict=lambda: dict(settings), vocab_size=settings["vocab_size"]))
        group = self.model._hosted.model.kv_groups[0]
        self.pool = make_pool(
            size=30, dtype=dtype, layer_num=len(self.model.attention_layers), head_num=group.kv_heads,
            head_dim=group.head_dim, v_head_dim=group.head_dim,
        )  # fmt: skip
        import_module(f"{PLUGIN}.kv_pool").create_kv(lambda pool: None, self.pool)
        backends = import_module(f"{PLUGIN}.attention_backend")
        self.host.attn_backend = backends.AtomAttentionBackend(
            SimpleNamespace(token_to_kv_pool=self.pool, req_to_token_pool=SimpleNamespace(req_to_token=SLOTS))
        )

    def step(self, mode: Mode, contexts: list[int], queries: list[int]) -> torch.Tensor:
        """Logits of the step's tokens."""
        batch = batch_of(mode, SLOTS, contexts, queries)
        spans = [range(end - count, end) for end, count in zip(contexts, queries, strict=True)]
        positions = torch.tensor([at for span in spans for at in span])
        ids = torch.cat([IDS[row, span.start : span.stop] for row, span in enumerate(spans)])
        self.host.attn_backend.init_forward_metadata(batch)
        logits: torch.Tensor = self.model(ids, positions, batch)
        return logits


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_prompts_in_parts_and_decodes_equal_whole_prompts(rig: Rig) -> None:
    whole = rig.step(Mode.EXTEND, [8, 8], [8, 8]).view(2, 8, -1)
    rig.pool.atom_kv[0].zero_()
    rig.step(Mode.EXTEND, [5, 3], [5, 3])
    rig.step(Mode.EXTEND, [6, 7], [1, 4])
    decoded = rig.step(Mode.DECODE, [7, 8], [1, 1])
    torch.testing.assert_close(decoded, torch.stack([whole[0, 6], whole[1, 7]]), rtol=1e-4, atol=1e-4)


def test_the_flag_decides_who_writes_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for flag in ("0", "1"):
        monkeypatch.setenv("ATOM_ROPE_FUSED_QKNORM", flag)
        torch.manual_seed(0)
        rig = Rig(monkeypatch)
        logits = rig.step(Mode.EXTEND, [8, 8], [8, 8])
        assert set(rig.host.saved) == {flag == "0"}
        assert rig.pool.k_buffer[0][4].any() and not rig.pool.k_buffer[0][24:28].any()
        found.append((logits, rig.pool.atom_kv[1].clone()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_the_fused_write_needs_a_cache_of_atom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_ROPE_FUSED_QKNORM", "1")
    monkeypatch.setenv("ATOM_DISABLE_SGLANG_PLUGIN_ATTENTION", "1")
    with pytest.raises(ValueError, match="ATOM_ROPE_FUSED_QKNORM=1 needs --attention-backend atom"):
        Rig(monkeypatch)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("gemma2", "a soft cap of the scores"),
        ("llama4", "chunks of attention"),
        ("deepseek-v3", "latent attention"),
    ],
)
def test_attention_that_not_all_of_sglang_s_backends_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    with pytest.raises(ValueError, match=f"models with {what} need --attention-backend atom"):
        Rig(monkeypatch, name=name, attention="torch_native")


def test_without_weights_nothing_runs(rig: Rig) -> None:
    rig.model._hosted.loaded = False
    with pytest.raises(ValueError, match="--load-format dummy does not give weights"):
        rig.step(Mode.EXTEND, [8, 8], [8, 8])


def test_embeddings_in_place_of_ids_are_refused(rig: Rig) -> None:
    batch = batch_of(Mode.DECODE, SLOTS, [1, 1], [1, 1])
    with pytest.raises(ValueError, match="without input_embeds"):
        rig.model(IDS[:, 0], torch.zeros(2), batch, input_embeds=torch.zeros(2, 4))
