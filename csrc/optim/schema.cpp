// The schemas of this room's operators. An operator whose name ends in _ changes its arguments in place.

#include <string>

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
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
  // The L2 norm of each of n tensors (fp32, bf16 or fp16), as fp32 (n). Gradients are clipped by these norms.
  m.def("foreach_norm(Tensor[] tensors) -> Tensor");
  optimizer("adamw_", R"(Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!) exp_avg_sq,
      Tensor(f!)? exp_avg_sq_scale, *, float lr, float beta1, float beta2, float eps, float weight_decay)");
  optimizer("lion_", R"(Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, *, float lr, float beta1,
      float beta2, float weight_decay)");
  // With momentum, as torch.optim.SGD.
  optimizer("sgd_", R"(Tensor(c!) momentum_buffer, Tensor(d!)? momentum_buffer_scale, *, float lr,
      float momentum, float dampening, float weight_decay, bool nesterov=False)");
  // params = params (1 - lr weight_decay) - lr grads: what an optimizer that is more than a rule ends with.
  optimizer("apply_", "*, float lr, float weight_decay");
  // The mean exp_avg = beta exp_avg + (1 - beta) grads; params are overwritten with lr times it, or with
  // nesterov with lr (beta exp_avg + (1 - beta) grads): what such an optimizer begins with.
  optimizer("ema_", R"(Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, *, float beta, bool nesterov=False,
      float lr=1.)");
  // Matrices. As torch.optim.Muon; products are bf16 on CUDA and on CPUs with units for it, else fp32.
  optimizer("muon_", R"(Tensor(c!) momentum_buffer, Tensor(d!)? momentum_buffer_scale, *, float lr,
      float momentum, float weight_decay, bool nesterov=True, float[] ns_coefficients=[3.4445, -4.775,
      2.0315], float eps=1e-7, int ns_steps=5, str? adjust_lr_fn=None)");
  // Two means of gradients, one of them slow; their weight and the slow one's beta may rise over t_alpha and
  // t_beta3 steps.
  optimizer("ademamix_", R"(Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!) exp_avg_slow,
      Tensor(f!) exp_avg_sq, Tensor(g!)? exp_avg_sq_scale, *, float lr, float beta1, float beta2,
      float beta3, float alpha, float eps, float weight_decay, int? t_alpha=None, int? t_beta3=None)");
  // params are the points where gradients are taken, y; offset is z - y: the average is y - offset (1 -
  // beta1) / beta1.
  optimizer("schedule_free_adamw_", R"(Tensor(c!) offset, Tensor(d!) exp_avg_sq,
      Tensor(e!)? exp_avg_sq_scale, *, float lr, float beta1, float beta2, float eps, float weight_decay,
      int warmup_steps=0)");
  // adamw_ whose update has the norm of the weights.
  optimizer("lamb_", R"(Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!) exp_avg_sq,
      Tensor(f!)? exp_avg_sq_scale, *, float lr, float beta1, float beta2, float eps, float weight_decay)");
  // As torch.optim.Adafactor, and with beta1 > 0 a mean exp_avg of the updates. For each parameter, fp32: of
  // two or more dimensions row_var (..., rows, 1) and col_var (..., 1, columns), of others its variance; the
  // rest are empty, (0).
  optimizer("adafactor_", R"(Tensor(c!)? exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!)[] row_var,
      Tensor(f!)[] col_var, Tensor(g!)[] variance, *, float lr, float beta1=0., float beta2_decay=-0.8,
      float? eps1=None, float eps2=1e-3, float d=1., float weight_decay=0.)");
  // Adafactor with a mean of updates, divided by the root of its instability. For each parameter, fp32: of
  // two or more dimensions the second moment's and the instability's means, of others the second moment; the
  // rest are empty, (0).
  optimizer("came_", R"(Tensor(c!) exp_avg, Tensor(d!)? exp_avg_scale, Tensor(e!)[] exp_avg_sq_row,
      Tensor(f!)[] exp_avg_sq_col, Tensor(g!)[] exp_avg_sq, Tensor(h!)[] exp_avg_res_row,
      Tensor(i!)[] exp_avg_res_col, *, float lr, float beta1=0.9, float beta2=0.999, float beta3=0.9999,
      float eps1=1e-30, float eps2=1e-16, float clip_threshold=1., float weight_decay=0.)");
}
