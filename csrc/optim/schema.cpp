// Schemas of the optimizers' operators. An operator whose name ends in _ modifies its arguments in place.

#include <string>

#include <torch/library.h>

#include <shoestring/optim/rules.h>

#include "optim/inner.h"
#include "optim/optimizer.h"

namespace shoestring::optim::ops {
namespace {

// Defines the operator of an optimizer class. Its arguments are those of struct Arguments, with the moments
// and the options of the class.
template <class Options>
void define(torch::Library& m, const std::string& name) {
  const Options options;
  const Arguments arguments(options);
  TORCH_INTERNAL_ASSERT(name == arguments.rule.op);
  m.def(c10::str(name, "(", schema_of(arguments), ") -> ()").c_str());
}

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Computes the L2 norm of each of n tensors (fp32, bf16 or fp16), as fp32 (n). Gradient clipping uses these
  // norms.
  m.def("foreach_norm(Tensor[] tensors) -> Tensor");
  // AdamW: one optimizer step, on every parameter whose gradient (fp32, bf16 or fp16) is given. Parameters
  // without a gradient do not change, nor do their step counters. The arithmetic is fp32, with the moments
  // before they are quantised. An error changes no tensor.
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
  // the first parameter on. Only these blocks are stepped. The gradient of a parameter of which some blocks
  // are stepped may be flat, with the elements of these blocks alone.
  define<AdamWOptions>(m, "adamw_");
  // Lion. The state and the arguments of the step are those of adamw_, as for all optimizers below.
  define<LionOptions>(m, "lion_");
  // SGD with momentum, as in torch.optim.SGD.
  define<SGDOptions>(m, "sgd_");
  // Computes params = params (1 - lr weight_decay) - lr grads. Optimizers such as LAMB and Muon pass their
  // update as `grads` and call _apply_ last.
  define<ApplyOptions>(m, "_apply_");
  // Computes exp_avg = beta exp_avg + (1 - beta) grads, and overwrites params with lr exp_avg. With nesterov,
  // overwrites params with lr (beta exp_avg + (1 - beta) grads). Optimizers such as Muon call _ema_ first and
  // process its result.
  define<EmaOptions>(m, "_ema_");
  // Muon for matrices, as in torch.optim.Muon. Matrix products are bf16 on CUDA and on CPUs with bf16 units,
  // and fp32 otherwise.
  define<MuonOptions>(m, "muon_");
  // AdEMAMix: AdamW with a second, slow mean of gradients. The slow mean's weight alpha can rise over t_alpha
  // steps, and its decay beta3 over t_beta3 steps.
  define<AdEMAMixOptions>(m, "ademamix_");
  // Schedule-Free AdamW. params are the points y, at which gradients are taken, and offset is z - y in the
  // notation of arXiv 2405.15682. The average x is y - offset (1 - beta1) / beta1.
  define<ScheduleFreeAdamWOptions>(m, "schedule_free_adamw_");
  // LAMB: the update of AdamW, scaled to the norm of the weights.
  define<LAMBOptions>(m, "lamb_");
  // Adafactor, as in torch.optim.Adafactor. With beta1 > 0 it also keeps exp_avg, a running mean of the
  // updates, and applies this mean. A parameter with two or more dimensions has row_var (..., rows, 1) and
  // col_var (..., 1, columns), fp32. Other parameters have `variance`, fp32. Tensors that a parameter does
  // not have are empty, (0).
  define<AdafactorOptions>(m, "adafactor_");
  // CAME: Adafactor with a mean of updates, divided by the root of the updates' instability. A parameter with
  // two or more dimensions has row and column means of the second moment and of the instability, fp32. Other
  // parameters have exp_avg_sq, fp32. Tensors that a parameter does not have are empty, (0).
  define<CAMEOptions>(m, "came_");
}

}  // namespace
}  // namespace shoestring::optim::ops
