// Every operator's schema: the contract on one page. A name that ends in _ changes its arguments in place.

#include <string>

#include <torch/library.h>

#include "offload/activation_store.h"

using shoestring::register_activation_store;

TORCH_LIBRARY(shoestring, m) {
  // Which build of the CPU kernels runs: plain, avx2 or avx512; and a switch for tests (false: not supported
  // here).
  m.def("cpu_capability() -> str");
  m.def("set_cpu_capability(str name) -> bool");

  // Cross-entropy of logit_scale (hidden W^T + low up^T + bias) against target, a chunk of tokens at a time:
  // no (tokens, vocab) tensor. hidden (..., features), weight (vocab, features), or the codes of a quantised
  // one where absmax is given; target (...) int64, bias (vocab), low (..., rank), up (vocab, rank). fp32 loss
  // for 16-bit inputs. The weight's gradient is added to weight_grad (vocab, features), fp32, where that is
  // given: in backward, or at once with grad_scale, the upstream gradient that there is going to be.
  const auto quantized = [](const std::string& of) {
    return "Tensor? " + of + "absmax=None, Tensor? " + of + "nested=None, str " + of +
           "quant_type='nf4', int " + of + "block_size=64, ";
  };
  const std::string layer = quantized("") + "Tensor? low=None, Tensor? up=None, ";
  const std::string gradients =
      "Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias, Tensor grad_low, Tensor grad_up)";
  const std::string rule =
      layer +
      "Tensor? class_weights=None, int ignore_index=-100, float label_smoothing=0., float softcap=0., "
      "float logit_scale=1., float z_loss=0., float filter_eps=0., Tensor(a!)? weight_grad=None, "
      "int workspace_mb=0";
  const std::string call = "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, " + rule +
                           ", str reduction='mean', Tensor? token_weights=None, bool shift=False, "
                           "float hard_fraction=1., float? grad_scale=None)";
  m.def(("linear_cross_entropy" + call + " -> Tensor").c_str());
  // The same, and what each token has besides: its loss, log-sum-exp and entropy (compute type), and its
  // likeliest class.
  m.def(("linear_cross_entropy_with_stats" + call +
         " -> (Tensor loss, Tensor token_loss, Tensor lse, Tensor entropy, Tensor argmax)")
            .c_str());
  // What both are made of: hidden (tokens, features), target (tokens), low (tokens, rank), and for each token
  // its results (entropy and argmax with stats, else empty). With output_mask (hidden, weight, bias, low, up)
  // the gradients of sum(grad_loss loss + grad_lse lse + grad_entropy entropy), factors of () or (tokens)
  // each; those that are not asked for are empty, and so is the weight's where it was added to weight_grad.
  // averaged: the factors are near 1 / tokens, and what 16 bits hold of the logits' gradient is multiplied by
  // about as many.
  m.def(("linear_cross_entropy_rows(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, " +
         rule +
         ", Tensor? grad_loss=None, Tensor? grad_lse=None, Tensor? grad_entropy=None, bool averaged=False, "
         "bool stats=False, bool[5] output_mask=[False, False, False, False, False]) -> (Tensor loss, Tensor "
         "lse, "
         "Tensor entropy, Tensor argmax, " +
         gradients)
            .c_str());

  // A shard of the classes, those from first_class on: for each token, in target's shape, the log-sum-exp of
  // its logits here and its target's logit, 0 where the target is elsewhere. weight, bias and up: of the
  // classes here; target: of the whole vocabulary.
  m.def(("linear_cross_entropy_shard(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, int "
         "first_class, " +
         layer +
         "int ignore_index=-100, float softcap=0., float logit_scale=1., Tensor(a!)? weight_grad=None, "
         "int workspace_mb=0) -> (Tensor lse, Tensor target_logit)")
            .c_str());

  // Cross-entropy of logits (..., vocab) against target (...) int64; fp32 loss for 16-bit logits. With _ the
  // gradient by the logits takes their place: in forward where the result is a scalar, so that its statistics
  // have no gradients, else in backward. Not without gradients, nor where autograd lets nobody change the
  // logits.
  const std::string of_logits =
      "Tensor target, *, Tensor? class_weights=None, int ignore_index=-100, float label_smoothing=0., float "
      "softcap=0., "
      "float logit_scale=1., float z_loss=0.";
  const std::string reduced =
      ", str reduction='mean', Tensor? token_weights=None, bool shift=False, float hard_fraction=1.) -> ";
  const std::string stats = "(Tensor loss, Tensor token_loss, Tensor lse, Tensor entropy, Tensor argmax)";
  m.def(("cross_entropy(Tensor logits, " + of_logits + reduced + "Tensor").c_str());
  m.def(("cross_entropy_(Tensor(a!) logits, " + of_logits + reduced + "Tensor").c_str());
  m.def(("cross_entropy_with_stats(Tensor logits, " + of_logits + reduced + stats).c_str());
  m.def(("cross_entropy_with_stats_(Tensor(a!) logits, " + of_logits + reduced + stats).c_str());
  // What they are made of: the results of each token (entropy and argmax with stats, else empty), and the
  // gradient of sum(grad_loss loss + grad_lse lse + grad_entropy entropy), factors of () or target's shape:
  // new, or in place.
  const std::string each =
      ", Tensor? grad_loss=None, Tensor? grad_lse=None, Tensor? grad_entropy=None, bool stats=False";
  m.def(("cross_entropy_rows(Tensor logits, " + of_logits + each +
         ", bool gradient=False) -> (Tensor loss, Tensor lse, "
         "Tensor entropy, Tensor argmax, Tensor grad_logits)")
            .c_str());
  m.def(("cross_entropy_rows_(Tensor(a!) logits, " + of_logits + each +
         ") -> (Tensor loss, Tensor lse, Tensor entropy, "
         "Tensor argmax)")
            .c_str());

  // How far the softmax of (hidden W^T + bias) / temperature is from the teacher's, for each token, both
  // logits a chunk of tokens at a time: 'forward_kl' KL(teacher || student), 'reverse_kl' KL(student ||
  // teacher), or 'jsd', beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 -
  // beta) student. The student's layer is as above; the teacher's has features of its own, no low and up, and
  // no gradient. target (...) int64: tokens that have ignore_index there do not count.
  const std::string distilled =
      "(Tensor hidden, Tensor weight, Tensor teacher_hidden, Tensor teacher_weight, Tensor? bias=None, "
      "Tensor? teacher_bias=None, *, " +
      layer + quantized("teacher_") +
      "Tensor? target=None, int ignore_index=-100, str divergence='forward_kl', float beta=0.5, float "
      "temperature=1., "
      "int workspace_mb=0";
  m.def(("linear_distillation" + distilled + ", str reduction='mean') -> Tensor").c_str());
  // What it is made of: tokens in one dimension, the loss of each, and with output_mask the gradients of
  // sum(grad_loss loss), a factor of () or (tokens); those that are not asked for are empty. averaged as
  // above.
  m.def(("linear_distillation_rows" + distilled +
         ", Tensor? grad_loss=None, bool averaged=False, "
         "bool[5] output_mask=[False, False, False, False, False]) -> (Tensor loss, " +
         gradients)
            .c_str());

  // self = beta self + alpha mat1 mat2, summed in fp32, which self may be for 16-bit matrices.
  m.def("addmm_(Tensor(a!) self, Tensor mat1, Tensor mat2, *, float beta=1., float alpha=1.) -> ()");

  // x *= factor (one element), where the factor is not 1: on CUDA the device finds out. What scales saved
  // gradients.
  m.def("scale_(Tensor(a!) x, Tensor factor) -> ()");

  // x in blocks of block_size along its flattened elements, each element 4 bits times the block's largest
  // magnitude: packed uint8 ((numel + 1) / 2), absmax fp32 (blocks). The bytes are bitsandbytes'. quant_type:
  // 'nf4', 'fp4' or 'int4', whose elements are (code - 8) * scale + offset: absmax int32, with the bf16 scale
  // in the lower half, the offset above.
  m.def(
      "quantize_4bit(Tensor x, *, str quant_type='nf4', int block_size=64) -> (Tensor packed, Tensor "
      "absmax)");
  // The scales in 8 bits (double quantisation): codes uint8 like absmax, and nested fp32 (257 + blocks /
  // 256): the offset, the 256 values of the 8-bit type, and a scale for every 256 codes. The codes then stand
  // for absmax.
  m.def("quantize_absmax(Tensor absmax) -> (Tensor codes, Tensor nested)");
  m.def(
      "dequantize_4bit(Tensor packed, Tensor absmax, Tensor? nested=None, *, SymInt[] shape, ScalarType "
      "dtype, "
      "str quant_type='nf4', int block_size=64) -> Tensor");
  // Each row of x (..., columns) as int8 codes (x's shape) and its largest magnitude, absmax fp32 (...),
  // which the code 127 stands for. The bytes are those of bitsandbytes' LLM.int8() weights.
  m.def("quantize_int8(Tensor x) -> (Tensor packed, Tensor absmax)");
  m.def("dequantize_int8(Tensor packed, Tensor absmax, *, ScalarType dtype) -> Tensor");
  // Either of them into out, contiguous, whose elements the parts stand for.
  m.def(
      "dequantize_(Tensor(a!) out, Tensor packed, Tensor absmax, Tensor? nested=None, *, str "
      "quant_type='nf4', "
      "int block_size=64) -> ()");
  // A quantised weight, below and in linear_cross_entropy, is packed and absmax of quantize_4bit (nested:
  // with the codes of quantize_absmax for absmax), or of quantize_int8, with quant_type 'int8' and block_size
  // the length of a row.

  // One step of an optimizer on every parameter whose gradient (fp32, bf16 or fp16) is given; the others keep
  // their step. The state of all of them lies in flat arenas, in the order of params, each beginning at a
  // multiple of 256 elements: step (tensors) fp32; moments fp32 or bf16 without scales, or codes with fp32
  // scales: uint8, 8 bits with one scale for 256 elements, or 4 bits (quantize_state_4bit). lr_tensor (in
  // place of lr), grad_scale (divides gradients), clip_coef (multiplies them) and found_inf (not zero:
  // nothing changes) are one fp32 element each on params' device, which reads them. accumulated (fp32 or
  // bf16, an arena) is added to the gradients and becomes zero. bf16 weights: stochastic_rounding, or with
  // weight_remainder (int16, an arena) exactly the fp32 that both make. Random bits follow from seed, step,
  // the parameter's number (none given: its index) and the element's place in the parameter. With blocks, the
  // arenas hold just so many blocks of 256 elements, from first_block of the first parameter on: only these
  // are stepped.
  const auto optimizer = [&](const std::string& name, const std::string& own) {
    const std::string schema =
        name + "(Tensor(a!)[] params, Tensor?[] grads, Tensor(b!) step, " + own +
        ", bool maximize=False, Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? clip_coef=None, "
        "Tensor? found_inf=None, Tensor(x!)? weight_remainder=None, Tensor(y!)? accumulated=None, "
        "bool stochastic_rounding=False, int seed=0, int[] numbers=[], int first_block=0, int? blocks=None) "
        "-> ()";
    m.def(schema.c_str());
  };
  // Writes a tensor's bytes at the position of an open file; 0 or errno. What of it is mapped from a file
  // does not stay in memory.
  m.def("write_tensor(int fd, Tensor x) -> int");
  // The first of PEFT's patterns that matches a module's name, or -1, and the text of its first group. rule:
  // 0 the whole name, 1 what it ends with, 2 a module that it is in, 3 the number of its layer
  // (csrc/adapters/pattern.h). Raises ValueError.
  m.def("match_patterns(str caller, str[] patterns, str name, int rule) -> (int, str)");

  // The L2 norm of all elements of all tensors, fp32, bf16 or fp16, together: fp32 (). What gradients are
  // clipped by.
  m.def("foreach_norm(Tensor[] tensors) -> Tensor");
  optimizer("adamw_",
            "Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!) exp_avg_sq, Tensor(f!)? "
            "exp_avg_sq_scale, *, "
            "float lr, float beta1, float beta2, float eps, float weight_decay");
  optimizer("lion_",
            "Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, *, float lr, float beta1, float beta2, float "
            "weight_decay");
  // With momentum, as torch.optim.SGD.
  optimizer("sgd_",
            "Tensor(c!) momentum_buffer, Tensor(d!)? momentum_buffer_scale, *, float lr, float momentum, "
            "float dampening, float weight_decay, bool nesterov=False");
  // params = params (1 - lr weight_decay) - lr grads: what an optimizer that is more than a rule ends with.
  optimizer("apply_", "*, float lr, float weight_decay");
  // The mean exp_avg = beta exp_avg + (1 - beta) grads; params are overwritten with lr times it, or with
  // nesterov with lr (beta exp_avg + (1 - beta) grads): what such an optimizer begins with.
  optimizer("ema_",
            "Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, *, float beta, bool nesterov=False, float lr=1.");
  // Matrices. As torch.optim.Muon; products are bf16 on CUDA and on CPUs with units for it, else fp32.
  optimizer("muon_",
            "Tensor(c!) momentum_buffer, Tensor(d!)? momentum_buffer_scale, *, float lr, float momentum, "
            "float weight_decay, bool nesterov=True, float[] ns_coefficients=[3.4445, -4.775, 2.0315], float "
            "eps=1e-7, "
            "int ns_steps=5, str? adjust_lr_fn=None");
  // Two means of gradients, one of them slow; their weight and the slow one's beta may rise over t_alpha and
  // t_beta3 steps.
  optimizer("ademamix_",
            "Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!) exp_avg_slow, "
            "Tensor(f!) exp_avg_sq, Tensor(g!)? exp_avg_sq_scale, *, float lr, float beta1, float beta2, "
            "float beta3, "
            "float alpha, float eps, float weight_decay, int? t_alpha=None, int? t_beta3=None");
  // params are the points where gradients are taken, y; offset is z - y: the average is y - offset (1 -
  // beta1) / beta1.
  optimizer(
      "schedule_free_adamw_",
      "Tensor(c!) offset, Tensor(d!) exp_avg_sq, Tensor(e!)? exp_avg_sq_scale, *, float lr, float beta1, "
      "float beta2, float eps, float weight_decay, int warmup_steps=0");
  // adamw_ whose update has the norm of the weights.
  optimizer("lamb_",
            "Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!) exp_avg_sq, Tensor(f!)? "
            "exp_avg_sq_scale, *, "
            "float lr, float beta1, float beta2, float eps, float weight_decay");
  // As torch.optim.Adafactor, and with beta1 > 0 a mean exp_avg of the updates. For each parameter, fp32: of
  // two or more dimensions row_var (..., rows, 1) and col_var (..., 1, columns), of others its variance; the
  // rest are empty, (0).
  optimizer("adafactor_",
            "Tensor(c!)? exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!)[] row_var, Tensor(f!)[] col_var, "
            "Tensor(g!)[] variance, *, float lr, float beta1=0., float beta2_decay=-0.8, float? eps1=None, "
            "float eps2=1e-3, float d=1., float weight_decay=0.");
  // Adafactor with a mean of updates, divided by the root of its instability. For each parameter, fp32: of
  // two or more dimensions the second moment's and the instability's means, of others the second moment; the
  // rest are empty, (0).
  optimizer(
      "came_",
      "Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!)[] exp_avg_sq_row, Tensor(f!)[] "
      "exp_avg_sq_col, "
      "Tensor(g!)[] exp_avg_sq, Tensor(h!)[] exp_avg_res_row, Tensor(i!)[] exp_avg_res_col, *, float lr, "
      "float beta1=0.9, float beta2=0.999, float beta3=0.9999, float eps1=1e-30, float eps2=1e-16, "
      "float clip_threshold=1., float weight_decay=0.");
  // Block-wise 8-bit state from values and back: codes of x's shape, and a scale for each 256 elements. An
  // unsigned map (signed=False, for x >= 0) has no zero but for zero itself.
  m.def("quantize_8bit(Tensor x, *, bool signed) -> (Tensor codes, Tensor scale)");
  m.def("dequantize_8bit(Tensor codes, Tensor scale, *, bool signed) -> Tensor");
  // The same in 4 bits, flat and in whole blocks of 256: 128 bytes of codes each, and a scale for each 32
  // (signed) or 128 elements. With a step, rounded as optimizers round what moves slowly: up or down by turns
  // from step to step.
  m.def("quantize_state_4bit(Tensor x, *, bool signed, int? step=None) -> (Tensor codes, Tensor scale)");
  m.def("dequantize_state_4bit(Tensor codes, Tensor scale, *, bool signed, SymInt numel) -> Tensor");

  // x (..., in_features) times the transpose of a frozen quantised weight (out_features, in_features), plus
  // bias. The weight is dequantised a panel of rows at a time, never whole. Gradients by x and bias.
  m.def(
      "quantized_linear(Tensor x, Tensor packed, Tensor absmax, Tensor? nested=None, Tensor? bias=None, *, "
      "SymInt out_features, str quant_type='nf4', int block_size=64) -> Tensor");
  m.def(
      "quantized_linear_backward(Tensor grad_output, Tensor packed, Tensor absmax, Tensor? nested, *, SymInt "
      "in_features, "
      "str quant_type, int block_size) -> Tensor");

  // x with each element dropped with probability p, the others divided by 1 - p. The mask is a function of
  // seed, one int64, and the place: backward makes it again, and nothing is kept.
  m.def("seeded_dropout(Tensor x, Tensor seed, float p) -> Tensor");
  // silu(gate) * up.
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad_output, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  // gelu(gate) * up. approximate: 'tanh' or 'none'.
  m.def("geglu(Tensor gate, Tensor up, str approximate='tanh') -> Tensor");
  m.def("geglu_backward(Tensor grad_output, Tensor gate, Tensor up, str approximate) -> (Tensor, Tensor)");

  // y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension; with a residual, of x +
  // residual, which is the second result. casting: what 16-bit input is rounded to before the last
  // multiplication, 'llama': the first factor, 'gemma': nothing, 'none': everything. weight (features), of
  // any floating-point dtype.
  m.def(
      "rms_norm(Tensor x, Tensor? weight=None, *, float eps, float offset=0., str casting='llama') -> "
      "Tensor");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, *, float eps, float offset=0., str "
      "casting='llama') -> "
      "(Tensor y, Tensor sum)");
  // What they are made of: sum is empty without a residual, rstd fp32 (fp64 for fp64), one a row; grad_sum is
  // added to grad_x; grad_weight is empty where it is not asked for.
  m.def(
      "rms_norm_forward(Tensor x, Tensor? residual, Tensor? weight, float eps, float offset, str casting) -> "
      "(Tensor y, "
      "Tensor sum, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor rstd, float "
      "offset, "
      "bool weight_grad) -> (Tensor grad_x, Tensor grad_weight)");
  // (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.
  m.def("layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, *, float eps) -> Tensor");
  m.def(
      "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, "
      "Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor grad_y, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
      "bool weight_grad, bool bias_grad) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)");

  // Rotary position embedding of q and k: (batch, heads, tokens, head_dim) or (tokens, heads, head_dim), of
  // any strides, the heads of either its own. cos and sin: (tokens, width) or (1 or batch, tokens, width), or
  // with position_ids (tokens) or (1 or batch, tokens) int64 (positions, width); width is rotary_dim / 2, or
  // rotary_dim where each angle is there twice. The first rotary_dim (None: all) elements are turned; in
  // pairs of neighbours if interleaved, else rotary_dim / 2 apart. With q_weight and k_weight (head_dim),
  // RMSNorm of each head first, times (offset + weight).
  m.def(
      "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, *, int? rotary_dim=None, bool interleaved=False, "
      "Tensor? position_ids=None, Tensor? q_weight=None, Tensor? k_weight=None, float eps=1e-06, float "
      "offset=0.) -> "
      "(Tensor, Tensor)");
  // q and k: with weights, whose gradients are empty where they are not asked for.
  m.def(
      "rope_backward(Tensor grad_q, Tensor grad_k, Tensor? q, Tensor? k, Tensor cos, Tensor sin, int? "
      "rotary_dim, "
      "bool interleaved, Tensor? position_ids, Tensor? q_weight, Tensor? k_weight, float eps, float offset, "
      "bool weight_grad) -> (Tensor grad_q, Tensor grad_k, Tensor grad_q_weight, Tensor grad_k_weight)");

  // softmax(softcap tanh(scale q k^T / softcap) + bias - alibi_slopes |i - j|) v, a block at a time. q
  // (batch, heads, tokens, head_dim), k and v (batch, kv heads, keys, features); or packed (tokens, heads,
  // features), with the offsets of the sequences, int32 (sequences + 1). causal and window (left, right; -1:
  // all) are aligned at the last query and key. bias (batch, heads, queries, keys), any of them 1; packed
  // (heads, queries of all, keys of a sequence); bool: true where a key is seen. sinks (heads): scores of a
  // key without a value. Where a query sees nothing, out is 0. Gradients by q, k, v, bias, sinks, and of lse.
  // deterministic: the same bits in each run, so no operators of PyTorch's; None: as PyTorch is told.
  const std::string attended =
      "Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? sinks=None, *, bool causal=False, int[] "
      "window=[-1, -1], "
      "float softcap=0., float? scale=None, Tensor? alibi_slopes=None, Tensor? cu_seqlens_q=None, "
      "Tensor? cu_seqlens_k=None, float dropout_p=0., Tensor? seed=None, bool? deterministic=None";
  m.def(("attention(" + attended + ") -> Tensor").c_str());
  // lse: log-sum-exp of the scores (and the sink), fp32: (batch, heads, queries), packed (heads, queries).
  m.def(("attention_with_lse(" + attended + ") -> (Tensor out, Tensor lse)").c_str());
  // Those that output_mask asks for, the others empty.
  m.def(
      ("attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool[5] output_mask, " +
       attended + ") -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias, Tensor grad_sinks)")
          .c_str());

  // x itself. What made it is kept by a checkpoint around it whose `keep` names the tag, so that backward
  // does not make it again; x was not modified in place since.
  m.def("tag_activation(Tensor x, str tag) -> Tensor");
  // The operators that names for a checkpoint's `keep` stand for; tags are left out.
  m.def("checkpoint_operators(str[] keep) -> str[]");
  // What a plan may do with a block's activations: the name, whether it is recomputed, but for the results of
  // which operators, and whether what is saved leaves the device.
  m.def("checkpoint_choices() -> (str[] names, bool[] recomputed, str[][] keep, bool[] offloaded)");

  // The bin, from 0 on, that each sequence is put into, so that none has more than capacity tokens: the
  // longest first, each into the first bin with room for it. lengths (sequences) int64, on the CPU.
  m.def("pack_sequences(Tensor lengths, int capacity) -> Tensor");

  // For a row of blocks, the choice of each that makes forward and backward quickest within a budget of
  // bytes, by the model in shoestring/checkpoint_plan.h, and the peak and seconds that it predicts; no plan
  // takes less than least_seconds. pending: bytes that may still be on their way when each begins. choices:
  // how many each block has, which bytes and so on list one after the other. simulate: the prediction for a
  // given plan.
  const std::string planned =
      "(float[] forward_seconds, float[] backward_seconds, int[] choices, int[] bytes, float[] "
      "extra_seconds, "
      "int[] link_bytes, int[] forward_bytes, int[] backward_bytes, ";
  const std::string linked =
      "*, int budget, float out_bytes_per_second=0., float in_bytes_per_second=0., float copy_share=0., int "
      "prefetch=1) -> ";
  const std::string result = "int[] pending, int peak, float seconds";
  m.def(("checkpoint_plan" + planned + linked + "(int[] plan, " + result + ", float least_seconds)").c_str());
  m.def(("simulate_checkpoint_plan" + planned + "int[] plan, " + linked + "(" + result + ")").c_str());

  // What autograd saves of x, in host memory or on a disk until it is wanted again. Python has
  // torch.classes.shoestring.ActivationStore, and C++ shoestring/offload_activations.h.
  register_activation_store(m);
  m.def(
      "store_activation(__torch__.torch.classes.shoestring.ActivationStore store, Tensor x) -> "
      "__torch__.torch.classes.shoestring.StoredActivation");
  m.def("reload_activation(__torch__.torch.classes.shoestring.StoredActivation activation) -> Tensor");

  // gain * (x W^T + scaling * low B^T) + bias with low = low_scale * dropped(x) A^T. W is frozen: dense
  // (out_features, in_features) in x's dtype, or, where absmax is given, the codes of a quantised weight.
  // lora_A (rank, in_features), lora_B (out_features, rank), bias and gain (out_features), low_scale (tokens,
  // rank), of any floating-point dtype. dropped: seeded_dropout; with a gate, x is silu(gate) * x. Gradients
  // by x, gate, bias, lora_A, lora_B and gain.
  m.def(
      "lora_linear(Tensor x, Tensor weight, Tensor? absmax, Tensor? nested, Tensor? bias, Tensor? lora_A, "
      "Tensor? lora_B, *, "
      "Tensor? gain=None, Tensor? low_scale=None, Tensor? gate=None, Tensor? seed=None, float dropout=0., "
      "float scaling=1., str quant_type='nf4', int block_size=64) -> Tensor");
  // Several layers over one input, which share the dropout. layers has weight, absmax, nested, bias, lora_A,
  // lora_B, gain and low_scale of the first one, then of the second, and so on.
  const std::string group =
      "Tensor?[] layers, Tensor? gate, Tensor? seed, float dropout, float[] scaling, "
      "str[] quant_type, int[] block_size";
  m.def(("lora_linear_group(Tensor x, " + group + ") -> Tensor[]").c_str());
  // The same, with low of all layers side by side (tokens, ranks).
  m.def(("lora_linear_group_forward(Tensor x, " + group + ") -> (Tensor[], Tensor)").c_str());
  // The gradients that output_mask asks for: by x, gate, and lora_A, lora_B and gain of each layer; the
  // others are empty. outputs: of the layers whose gain has a gradient.
  m.def(("lora_linear_group_backward(Tensor?[] grad_outputs, Tensor?[] outputs, Tensor x, Tensor low, " +
         group + ", bool[] output_mask) -> Tensor[]")
            .c_str());
  // The norms of the rows of W + scaling * B A (out_features), without a temporary of W's size. No gradients.
  m.def(
      "lora_weight_norm(Tensor weight, Tensor? absmax, Tensor? nested, Tensor lora_A, Tensor lora_B, *, "
      "float scaling=1., "
      "str quant_type='nf4', int block_size=64) -> Tensor");
}
