// Schemas of the optimizers' operators. An operator whose name ends in _ modifies its arguments in place.

#include <string>

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Defines an operator that takes one optimizer step, on every parameter whose gradient (fp32, bf16 or fp16)
  // is given. Parameters without a gradient do not change, nor do their step counters.
  //
  // The state of all parameters is in flat arenas. The parameters are stored in the order of `params`, and
  // each begins at a multiple of 256 elements:
  // - step: (tensors), fp32;
  // - moments: fp32 or bf16 without scales, or uint8 codes with fp32 scales. Codes have 8 bits with one scale
  //   per 256 elements, or 4 bits (see quantize_state_4bit);
  // - accumulated: fp32 or bf16. It is added to the gradients, and then set to zero;
  // - weight_remainder: int16. A bf16 weight and its remainder together store an fp32 exactly. Without
  //   weight_remainder, stochastic_rounding selects the rounding of bf16 weights.
  //
  // Four options are one fp32 element each, in the memory of the device of `params`. lr_tensor replaces lr,
  // grad_scale divides the gradients, and clip_coef multiplies the gradients. If found_inf is not zero, the
  // step is skipped: it only sets `accumulated` to zero.
  //
  // Random bits depend on the seed, the step, the parameter's number (by default its index) and the element's
  // index in the parameter.
  //
  // If `blocks` is given, the arenas hold only that many blocks of 256 elements, from block first_block of
  // the first parameter on. Only these blocks are stepped.
  const auto optimizer = [&](const std::string& name, const std::string& own) {
    const std::string schema =
        name + "(Tensor(a!)[] params, Tensor?[] grads, Tensor(b!) step, " + own +
        ", bool maximize=False, Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? clip_coef=None, "
        "Tensor? found_inf=None, Tensor(x!)? weight_remainder=None, Tensor(y!)? accumulated=None, "
        "bool stochastic_rounding=False, int seed=0, int[] numbers=[], int first_block=0, int? blocks=None) "
        "-> ()";
    m.def(schema.c_str());
  };
  // Computes the L2 norm of each of n tensors (fp32, bf16 or fp16), as fp32 (n). Gradient clipping uses these
  // norms.
  m.def("foreach_norm(Tensor[] tensors) -> Tensor");
  optimizer("adamw_", R"(Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!) exp_avg_sq,
      Tensor(f!)? exp_avg_sq_scale, *, float lr, float beta1, float beta2, float eps, float weight_decay)");
  optimizer("lion_", R"(Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, *, float lr, float beta1,
      float beta2, float weight_decay)");
  // SGD with momentum, as in torch.optim.SGD.
  optimizer("sgd_", R"(Tensor(c!) momentum_buffer, Tensor(d!)? momentum_buffer_scale, *, float lr,
      float momentum, float dampening, float weight_decay, bool nesterov=False)");
  // Computes params = params (1 - lr weight_decay) - lr grads. Optimizers such as LAMB and Muon pass their
  // update as `grads` and call _apply_ last.
  optimizer("_apply_", "*, float lr, float weight_decay");
  // Computes exp_avg = beta exp_avg + (1 - beta) grads, and overwrites params with lr exp_avg. With nesterov,
  // overwrites params with lr (beta exp_avg + (1 - beta) grads). Optimizers such as Muon call _ema_ first and
  // process its result.
  optimizer("_ema_", R"(Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, *, float beta, bool nesterov=False,
      float lr=1.)");
  // Muon for matrices, as in torch.optim.Muon. Matrix products are bf16 on CUDA and on CPUs with bf16 units,
  // and fp32 otherwise.
  optimizer("muon_", R"(Tensor(c!) momentum_buffer, Tensor(d!)? momentum_buffer_scale, *, float lr,
      float momentum, float weight_decay, bool nesterov=True, float[] ns_coefficients=[3.4445, -4.775,
      2.0315], float eps=1e-7, int ns_steps=5, str? adjust_lr_fn=None)");
  // AdEMAMix: AdamW with a second, slow mean of gradients. The slow mean's weight alpha can rise over t_alpha
  // steps, and its decay beta3 over t_beta3 steps.
  optimizer("ademamix_", R"(Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!) exp_avg_slow,
      Tensor(f!) exp_avg_sq, Tensor(g!)? exp_avg_sq_scale, *, float lr, float beta1, float beta2,
      float beta3, float alpha, float eps, float weight_decay, int? t_alpha=None, int? t_beta3=None)");
  // Schedule-Free AdamW. params are the points y, at which gradients are taken, and offset is z - y in the
  // notation of arXiv 2405.15682. The average x is y - offset (1 - beta1) / beta1.
  optimizer("schedule_free_adamw_", R"(Tensor(c!) offset, Tensor(d!) exp_avg_sq,
      Tensor(e!)? exp_avg_sq_scale, *, float lr, float beta1, float beta2, float eps, float weight_decay,
      int warmup_steps=0)");
  // LAMB: the update of AdamW, scaled to the norm of the weights.
  optimizer("lamb_", R"(Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!) exp_avg_sq,
      Tensor(f!)? exp_avg_sq_scale, *, float lr, float beta1, float beta2, float eps, float weight_decay)");
  // Adafactor, as in torch.optim.Adafactor. With beta1 > 0 it also keeps exp_avg, a running mean of the
  // updates, and applies this mean. A parameter with two or more dimensions has row_var (..., rows, 1) and
  // col_var (..., 1, columns), fp32. Other parameters have `variance`, fp32. Tensors that a parameter does
  // not have are empty, (0).
  optimizer("adafactor_", R"(Tensor(c!)? exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!)[] row_var,
      Tensor(f!)[] col_var, Tensor(g!)[] variance, *, float lr, float beta1=0., float beta2_decay=-0.8,
      float? eps1=None, float eps2=1e-3, float d=1., float weight_decay=0.)");
  // CAME: Adafactor with a mean of updates, divided by the root of the updates' instability. A parameter with
  // two or more dimensions has row and column means of the second moment and of the instability, fp32. Other
  // parameters have exp_avg_sq, fp32. Tensors that a parameter does not have are empty, (0).
  optimizer("came_", R"(Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!)[] exp_avg_sq_row,
      Tensor(f!)[] exp_avg_sq_col, Tensor(g!)[] exp_avg_sq, Tensor(h!)[] exp_avg_res_row,
      Tensor(i!)[] exp_avg_res_col, *, float lr, float beta1=0.9, float beta2=0.999, float beta3=0.9999,
      float eps1=1e-30, float eps2=1e-16, float clip_threshold=1., float weight_decay=0.)");
}
