"""Megatron-core's own GPTModel on CPU ranks: loads checkpoints, or makes them, and computes logits.

Run by `test_megatron_core.py` in an environment that has megatron-core and not pentad:
    torchrun megatron_core_worker.py OUT
OUT/jobs.json lists what to load or save; the shape of a model that is loaded is taken from its
checkpoint's own arguments. OUT/logits.pt gets the logits of every job.
"""

import argparse
import json
import sys
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")
sys.path.append(str(Path(__file__).parents[2] / "megatron_cpu"))


def run_on_cpu():
    from megatron_on_cpu import imported_lightly, replace_cuda

    with imported_lightly():
        import megatron.core.models.gpt.gpt_model  # noqa: F401
        import megatron.core.transformer.moe.moe_layer  # noqa: F401
        import megatron.core.transformer.moe.moe_utils as moe_utils
    moe_utils.te_general_gemm = None  # which it does not define without Transformer Engine
    replace_cuda()


def transformer_config(args):
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = {}
    if args.num_experts:
        experts = dict(
            num_moe_experts=args.num_experts,
            moe_ffn_hidden_size=args.moe_ffn_hidden_size,
            moe_shared_expert_intermediate_size=args.moe_shared_expert_intermediate_size,
            moe_shared_expert_gate=args.moe_shared_expert_gate,
            moe_router_topk=args.moe_router_topk,
            moe_router_pre_softmax=args.moe_router_pre_softmax,
            moe_router_load_balancing_type=args.moe_router_load_balancing_type,
            moe_layer_freq=args.moe_layer_freq,
            moe_token_dispatcher_type="allgather",  # its all-to-all does not run on gloo
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        )
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        window_size=args.window_size,
        window_attn_skip_freq=args.window_attn_skip_freq,
        **experts,
    )
    for name, value in vars(args).items():
        if name.startswith("yarn_"):  # GPTModel reads them there; the class does not declare them
            setattr(config, name, value)
    return config


def build_chunks(args):
    """The model chunks of this rank, and whether each is the first and the last stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = transformer_config(args)
    pp, num_pp = (
        parallel_state.get_pipeline_model_parallel_rank(),
        args.pipeline_model_parallel_size,
    )
    num_chunks = args.virtual_pipeline_model_parallel_size or 1
    chunks = []
    for chunk in range(num_chunks):
        vp_stage = chunk if num_chunks > 1 else None
        if args.num_experts:
            spec = get_gpt_decoder_block_spec(
                config,
                use_transformer_engine=False,
                normalization="RMSNorm",
                vp_stage=vp_stage,
            )
        else:
            spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=args.qk_layernorm)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pp == 0 and chunk == 0,
            post_process=pp == num_pp - 1 and chunk == num_chunks - 1,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
            rotary_percent=args.rotary_percent,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            parallel_output=False,
            vp_stage=vp_stage,
        )
        chunks.append(model.eval())
    return chunks


def load_legacy(folder, chunks, args):
    from megatron.core import parallel_state as ps

    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    if args.pipeline_model_parallel_size > 1:
        name += f"_{ps.get_pipeline_model_parallel_rank():03d}"
    if args.expert_model_parallel_size > 1:
        name += f"_{ps.get_expert_model_parallel_rank():03d}"
    content = torch.load(folder / name / "model_optim_rng.pt", weights_only=False)
    for number, model in enumerate(chunks):
        key = "model" if len(chunks) == 1 else f"model{number}"
        model.load_state_dict(content[key], strict=True)


def sharded(chunks):
    if len(chunks) == 1:
        return {"model": chunks[0].sharded_state_dict()}
    return {f"model{n}": model.sharded_state_dict() for n, model in enumerate(chunks)}


def load_dist(folder, chunks):
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(sharded(chunks), str(folder))
    for number, model in enumerate(chunks):
        key = "model" if len(chunks) == 1 else f"model{number}"
        model.load_state_dict(state[key], strict=True)


@torch.no_grad()
def logits_of(chunks, ids, args):
    """One forward through all stages; hidden states are passed on between ranks by hand."""
    from megatron.core import parallel_state as ps

    length = ids.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.triu(torch.ones(1, 1, length, length), 1).bool()
    pp, num_pp = ps.get_pipeline_model_parallel_rank(), args.pipeline_model_parallel_size
    group = ps.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    hidden = torch.empty(length, 1, args.hidden_size)
    out = torch.empty(1, length, args.padded_vocab_size)
    for stage in range(num_pp * len(chunks)):
        owner, model = stage % num_pp, chunks[stage // num_pp]
        is_last = stage == num_pp * len(chunks) - 1
        if pp == owner:
            if stage > 0:
                model.set_input_tensor(hidden)
            result = model(ids, positions, mask)
            if is_last:
                out.copy_(result)
            else:
                hidden = result.contiguous()
        dist.broadcast(out if is_last else hidden, ranks[owner], group=group)
    return out


@torch.no_grad()
def randomise(chunks):
    """Every parameter, norms included; equal where several ranks hold the same one."""
    from megatron.core import parallel_state as ps

    tp, ep = ps.get_tensor_model_parallel_rank(), ps.get_expert_model_parallel_rank()
    pp = ps.get_pipeline_model_parallel_rank()
    for number, model in enumerate(chunks):
        for name, tensor in model.named_parameters():
            is_vocabulary = name in ("embedding.word_embeddings.weight", "output_layer.weight")
            if is_vocabulary and model.share_embeddings_and_output_weights:
                key = f"vocabulary {tp}"
            else:
                is_whole = "norm" in name or "router" in name
                expert = ep if ".experts." in name else 0
                key = f"{name} {0 if is_whole else tp} {pp} {number} {expert}"
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(0.15 * noise if tensor.dim() > 1 else 0.7 + 0.3 * noise)


def do(job, ids):
    from megatron.core import dist_checkpointing, parallel_state

    folder = Path(job["folder"])
    if job["action"] == "save":
        args = argparse.Namespace(**job["args"])
    elif (folder / "common.pt").exists():
        args = torch.load(folder / "common.pt", weights_only=False)["args"]
    else:
        first = min(folder.glob("mp_rank_*/model_optim_rng.pt"))
        args = torch.load(first, weights_only=False)["args"]
    vars(args).update(job.get("override", {}))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    chunks = build_chunks(args)
    if job["action"] == "save":
        randomise(chunks)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        state = {**sharded(chunks), "args": args, "checkpoint_version": 3.0, "iteration": 7}
        dist_checkpointing.save(state, str(folder))
    elif (folder / "common.pt").exists():
        load_dist(folder, chunks)
    else:
        load_legacy(folder, chunks, args)
    logits = logits_of(chunks, ids, args)
    parallel_state.destroy_model_parallel()
    return logits[0]


def main():
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    run_on_cpu()
    ids = torch.tensor(json.loads((out / "ids.json").read_text()))[None]
    results = {job["name"]: do(job, ids) for job in json.loads((out / "jobs.json").read_text())}
    if dist.get_rank() == 0:
        torch.save(results, out / "logits.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
