// Tests GradScaler: its steps, the order of its calls, its state, and that it does not wait for a device.
// tests/python/optim/test_grad_scaler.py compares it with torch.amp.GradScaler.

#include "catch.h"

#include <algorithm>
#include <limits>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "optim/optimizers.h"

using at::Tensor;
using Catch::Contains;
using namespace shoestring::optim;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Runs backward on a scaled loss whose gradient, without the scale, is `gradient` in every element.
void scaled_backward(GradScaler& scaler, const std::vector<Tensor>& params, double gradient) {
  Tensor loss = at::zeros({});
  for (const Tensor& p : params) loss = loss + (p * gradient).sum();
  torch::autograd::backward({scaler.scale(loss)}, {});
}

GradScaler small_scaler() { return GradScaler(GradScalerOptions().init_scale(1024).growth_interval(2)); }

double growth_tracker(const GradScaler& scaler) { return scaler.state()["_growth_tracker"].item<double>(); }

// Counts operators that make the host wait for a device.
int64_t synchronisations = 0;

std::unique_ptr<at::ObserverContext> count_synchronisation(const at::RecordFunction& function) {
  const std::string name = function.name();
  for (const char* waits : {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"})
    synchronisations += name == waits;
  return nullptr;
}

template <class Function>
int64_t synchronisations_of(const Function& function) {
  synchronisations = 0;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(count_synchronisation));
  function();
  at::removeCallback(handle);
  return synchronisations;
}

std::unique_ptr<torch::optim::Optimizer> libtorch_sgd(const std::vector<Tensor>& params) {
  return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(0.125).momentum(0.5));
}

}  // namespace

TEST_CASE("GradScaler divides gradients and skips steps", "[grad_scaler]") {
  for (const std::string name : {"AdamW", "SGD", "GaLore"}) {
    for (const bool unscale : {false, true}) {
      CAPTURE(name, unscale);
      const auto make = [&](const std::vector<Tensor>& p) -> std::unique_ptr<torch::optim::Optimizer> {
        if (name == "AdamW") return std::make_unique<AdamW>(p);
        if (name == "SGD") return libtorch_sgd(p);
        return std::make_unique<GaLore<AdamW>>(p, AdamWOptions(0.1), GaLoreOptions().rank(1));
      };
      const auto params = matrices(), plain = matrices();
      const auto opt = make(params), other = make(plain);
      GradScaler scaler = small_scaler();
      std::vector<double> scales, trackers;
      for (const double gradient : {0.5, kInf, 0.25, -kInf, std::nan(""), 1.0, -2.0, 4.0}) {
        opt->zero_grad();
        scaled_backward(scaler, params, gradient);
        if (std::isfinite(gradient)) {
          for (const Tensor& p : plain) p.mutable_grad() = at::full_like(p, gradient);
          other->step();
        }
        if (unscale) scaler.unscale_(*opt);
        if (unscale) CHECK(at::allclose(params[1].grad(), at::full_like(params[1], gradient), 0, 0, true));
        scaler.step(*opt);
        scaler.update();
        CHECK(equal(params, plain));
        scales.push_back(scaler.get_scale());
        trackers.push_back(growth_tracker(scaler));
      }
      CHECK(scales == std::vector<double>{1024, 512, 512, 256, 128, 128, 256, 256});
      CHECK(trackers == std::vector<double>{1, 0, 1, 0, 0, 1, 0, 1});
    }
  }
}

TEST_CASE("one inf gradient skips the step of every parameter of any dtype", "[grad_scaler]") {
  for (const bool ours : {false, true}) {
    auto params = parameters();
    params[1] = params[1].detach().to(at::kBFloat16).requires_grad_();
    std::unique_ptr<torch::optim::Optimizer> opt = libtorch_sgd(params);
    if (ours) opt = std::make_unique<SGD>(params);
    for (const int64_t bad : {0, 1, 2}) {
      CAPTURE(ours, bad);
      const auto before = clones(params);
      GradScaler scaler = small_scaler();
      opt->zero_grad();
      scaled_backward(scaler, params, 1);
      params[bad].grad().view(-1)[-1] = kInf;
      scaler.step(*opt);
      CHECK(equal(params, before));
      scaler.update();
      CHECK(scaler.get_scale() == 512);
    }
  }
}

TEST_CASE("our optimizers step and update without a synchronisation", "[grad_scaler]") {
  for (const RuleCase& rule : rule_cases()) {
    for (const bool unscale : {false, true}) {
      const auto params = matrices();
      const auto opt = rule.make(two_groups(params), "8bit", "nearest");
      opt->set_max_grad_norm(1.0);
      GradScaler scaler = small_scaler();
      for (const double gradient : {0.5, kInf, 0.25}) {
        CAPTURE(rule.name, unscale, gradient);
        scaled_backward(scaler, params, gradient);
        CHECK(synchronisations_of([&] {
                if (unscale) scaler.unscale_(*opt);
                scaler.step(*opt);
                scaler.update();
                scaler.update(at::full({}, 1024.0));
                opt->zero_grad();
              }) == 0);
      }
    }
  }
  // The counter sees the one synchronisation of LibTorch's optimizers, and that of get_scale().
  const auto params = matrices();
  const auto sgd = libtorch_sgd(params);
  GradScaler scaler = small_scaler();
  scaled_backward(scaler, params, 1);
  CHECK(synchronisations_of([&] {
          scaler.step(*sgd);
          scaler.update();
        }) == 1);
  CHECK(synchronisations_of([&] { scaler.get_scale(); }) == 1);
}

TEST_CASE("one scaler serves several optimizers", "[grad_scaler]") {
  const auto params = parameters(), others = parameters();
  AdamW ours(params);
  const auto theirs = libtorch_sgd(others);
  GradScaler scaler = small_scaler();
  const auto step = [&](double first, double second) {
    scaled_backward(scaler, params, first);
    scaled_backward(scaler, others, second);
    scaler.step(ours);
    scaler.step(*theirs);
    scaler.update();
    ours.zero_grad();
    theirs->zero_grad();
  };
  for (const bool first_is_bad : {false, true}) {
    const auto before = clones(params), others_before = clones(others);
    step(first_is_bad ? kInf : 1, first_is_bad ? 1 : kInf);
    // Only the optimizer with the inf gradients skips its step, but the common scale falls.
    CHECK(equal(params, before) == first_is_bad);
    CHECK(equal(others, others_before) != first_is_bad);
    CHECK(scaler.get_scale() == (first_is_bad ? 256 : 512));
  }
}

TEST_CASE("gradients are clipped after unscale_, and an inf before still skips the step", "[grad_scaler]") {
  const auto params = parameters(), plain = parameters();
  AdamW opt(params, AdamWOptions(0.1)), other(plain, AdamWOptions(0.1));
  GradScaler scaler = small_scaler();
  const auto clipped = [&](double gradient) {
    opt.zero_grad();
    scaled_backward(scaler, params, gradient);
    scaler.unscale_(opt);
    for (const Tensor& p : params) p.mutable_grad().clamp_(-0.5, 0.5);
    scaler.step(opt);
    scaler.update();
  };
  clipped(4);
  for (const Tensor& p : plain) p.mutable_grad() = at::full_like(p, 0.5);
  other.step();
  CHECK(equal(params, plain));
  clipped(kInf);  // after clamp_ all gradients are finite
  CHECK(equal(params, plain));
  CHECK(scaler.get_scale() == 512);
}

TEST_CASE("sums of accumulate() are scaled, looked at, and refused by unscale_", "[grad_scaler]") {
  const auto params = parameters(), plain = parameters();
  AdamW opt(params), other(plain);
  GradScaler scaler = small_scaler();
  const auto accumulated = [&](double gradient) {
    const auto micro = opt.accumulate();
    scaled_backward(scaler, params, gradient);
  };
  accumulated(0.25);
  CHECK_THROWS_WITH(scaler.unscale_(opt),
                    Contains("AdamW: unscale_: expected no gradients of accumulate()") &&
                        Contains("Clip with set_max_grad_norm"));
  scaled_backward(scaler, params, 0.5);
  scaler.step(opt);
  scaler.update();
  for (const Tensor& p : plain) p.mutable_grad() = at::full_like(p, 0.75);
  other.step();
  CHECK(equal(params, plain));
  opt.zero_grad();
  accumulated(kInf);
  scaler.step(opt);  // the only gradients are in the sums
  scaler.update();
  CHECK(equal(params, plain));
  CHECK(scaler.get_scale() == 512);
  // Divided gradients cannot be added to sums that are not divided.
  opt.zero_grad();
  scaled_backward(scaler, params, 1);
  scaler.unscale_(opt);
  opt.zero_grad();
  accumulated(1);
  CHECK_THROWS_WITH(scaler.step(opt), Contains("AdamW: scaled_step: expected no gradients of accumulate()"));
}

TEST_CASE("SAM's second half is a scaled step", "[grad_scaler]") {
  for (const bool ours : {false, true}) {
    const auto base = [&](const std::vector<Tensor>& p) -> std::unique_ptr<torch::optim::Optimizer> {
      return ours ? std::make_unique<SGD>(p, SGDOptions(0.1).state_format("fp32")) : libtorch_sgd(p);
    };
    const auto params = parameters(), plain = parameters();
    SAM opt(base(params)), other(base(plain));
    GradScaler scaler = small_scaler();
    double scale = 1024;
    int64_t waits = 0;
    for (const auto [first, second, unscale] :
         {std::tuple(1.0, 2.0, false), std::tuple(1.0, 3.0, true), std::tuple(1.0, kInf, false),
          std::tuple(kInf, 1.0, false), std::tuple(kInf, 1.0, true), std::tuple(1.0, 0.5, false)}) {
      CAPTURE(ours, first, second, unscale);
      const bool skips = std::isinf(first) || std::isinf(second);
      const auto before = clones(params);
      opt.zero_grad();
      scaled_backward(scaler, params, first);
      opt.first_step();
      CHECK(equal(clones(params), before) == std::isinf(first));
      opt.zero_grad();
      scaled_backward(scaler, params, second);
      waits += synchronisations_of([&] {
        if (unscale) scaler.unscale_(opt);
        scaler.step(opt);
        scaler.update();
      });
      if (skips) {
        CHECK(equal(clones(params), before));
        scale /= 2;
      } else {
        for (const Tensor& p : plain) p.mutable_grad() = at::full_like(p, first);
        other.first_step();
        for (const Tensor& p : plain) p.mutable_grad() = at::full_like(p, second);
        other.second_step();
        CHECK(equal(params, plain));
      }
      if (scaler.get_scale() > scale) scale *= 2;
      CHECK(scaler.get_scale() == scale);
    }
    CHECK(waits == (ours ? 0 : 6));
    CHECK_THROWS_WITH(opt.scaled_step(number(1)), Contains("SAM: scaled_step: expected first_step() before"));
  }
}

TEST_CASE("SAM's scaled_step divides for a base optimizer that cannot", "[grad_scaler]") {
  const auto params = parameters(), plain = parameters();
  SAM opt(libtorch_sgd(params)), other(libtorch_sgd(plain));
  for (const double gradient : {1.0, kInf}) {
    for (const Tensor& p : params) p.mutable_grad() = at::full_like(p, 8);
    opt.first_step();
    for (const Tensor& p : params) p.mutable_grad() = at::full_like(p, 8 * gradient);
    CHECK(opt.scaled_step(number(8)).item<double>() == std::isinf(gradient));
  }
  for (const Tensor& p : plain) p.mutable_grad() = at::ones_like(p);
  other.first_step();
  other.second_step();
  CHECK(equal(params, plain));
}

TEST_CASE("GradScaler refuses calls in the wrong order", "[grad_scaler]") {
  for (const bool ours : {false, true}) {
    CAPTURE(ours);
    const auto params = parameters();
    std::unique_ptr<torch::optim::Optimizer> opt = libtorch_sgd(params);
    if (ours) opt = std::make_unique<AdamW>(params);
    GradScaler scaler = small_scaler();
    const auto before = clones(params);
    const auto unscaled = Contains("expected a scaled loss, received none. Call backward() on the result of");
    CHECK_THROWS_WITH(scaler.step(*opt), Contains("GradScaler: step: ") && unscaled);
    CHECK_THROWS_WITH(scaler.unscale_(*opt), Contains("GradScaler: unscale_: ") && unscaled);
    CHECK_THROWS_WITH(scaler.update(), Contains("GradScaler: update: ") && unscaled);
    CHECK_THROWS_WITH(scaler.update(2.0), Contains("GradScaler: update: ") && unscaled);
    CHECK_THROWS_WITH(scaler.scale({}), Contains("GradScaler: scale: expected a tensor, received an undef"));

    scaler.scale(at::ones({}));
    CHECK_THROWS_WITH(scaler.update(), Contains("GradScaler: update: expected a step with gradients since "
                                                "the last update, received none. Call step() first."));
    if (ours) {
      scaler.step(*opt);  // does nothing, as in Python
    } else {
      CHECK_THROWS_WITH(scaler.step(*opt),
                        Contains("GradScaler: step: expected an optimizer whose parameters "
                                 "have gradients, received no gradient."));
    }
    CHECK_THROWS_WITH(scaler.update(), Contains("expected a step with gradients"));
    scaler.update(1024.0);
    scaler.unscale_(*opt);  // there are no gradients
    CHECK_THROWS_WITH(scaler.update(), Contains("expected a step with gradients"));
    if (ours) scaler.step(*opt);
    CHECK(equal(params, before));
    scaler.update(1024.0);

    scaled_backward(scaler, params, 1);
    scaler.unscale_(*opt);
    CHECK_THROWS_WITH(scaler.unscale_(*opt), Contains("GradScaler: unscale_: expected one call per optimizer "
                                                      "before step() and update(), received a second call."));
    CHECK(at::equal(params[1].grad(), at::ones_like(params[1])));
    scaler.step(*opt);
    const auto stepped = clones(params);
    CHECK_THROWS_WITH(scaler.step(*opt), Contains("GradScaler: step: expected one call per optimizer before "
                                                  "update(), received a second call. Call update() next."));
    CHECK_THROWS_WITH(scaler.unscale_(*opt), Contains("received a call after step(). Call update() next."));
    CHECK(equal(params, stepped));
    scaler.update();
    scaler.step(*opt);
    CHECK(!equal(params, stepped));
  }
}

TEST_CASE("fp16 gradients are divided within our steps only", "[grad_scaler]") {
  const Tensor p = at::ones({300}, at::kHalf).requires_grad_();
  AdamW ours({p});
  torch::optim::SGD theirs({p}, torch::optim::SGDOptions(0.1));
  GradScaler scaler = small_scaler();
  scaled_backward(scaler, {p}, 1);
  for (torch::optim::Optimizer* opt :
       {static_cast<torch::optim::Optimizer*>(&ours), static_cast<torch::optim::Optimizer*>(&theirs)}) {
    CHECK_THROWS_WITH(scaler.unscale_(*opt), Contains("GradScaler: unscale_: expected fp32, bf16 or fp64 "
                                                      "gradients") &&
                                                 Contains("received fp16 gradients."));
  }
  CHECK_THROWS_WITH(scaler.step(theirs), Contains("received fp16 gradients."));
  CHECK(at::equal(p.grad(), at::full_like(p, 1024)));
  scaler.step(ours);
  scaler.update();
  CHECK(at::all(p < 1).item<bool>());
}

TEST_CASE("the values of sparse gradients are divided and looked at", "[grad_scaler]") {
  const Tensor p = at::ones({4, 3}).requires_grad_(), q = at::ones({4, 3}).requires_grad_();
  torch::optim::Adagrad opt({p}, torch::optim::AdagradOptions(0.5));
  torch::optim::Adagrad other({q}, torch::optim::AdagradOptions(0.5));
  GradScaler scaler = small_scaler();
  scaler.scale(at::ones({}));
  const auto gradient = [](double value) {
    return at::sparse_coo_tensor(at::tensor({0, 2, 2}, at::kLong).view({1, 3}), at::full({3, 3}, value),
                                 {4, 3});
  };
  for (const double value : {2.0, kInf}) {
    p.mutable_grad() = gradient(1024 * value);
    scaler.step(opt);
    scaler.update();
  }
  q.mutable_grad() = gradient(2);
  other.step();
  CHECK(at::equal(p, q));
  CHECK(scaler.get_scale() == 512);
}

TEST_CASE("a disabled GradScaler only steps", "[grad_scaler]") {
  const auto params = parameters(), plain = parameters();
  AdamW opt(params), other(plain);
  GradScaler scaler(GradScalerOptions().enabled(false));
  CHECK(!scaler.is_enabled());
  scaled_backward(scaler, params, 1);
  scaler.unscale_(opt);
  scaler.step(opt);
  scaler.step(opt);
  scaler.update();
  scaler.update(2.0);
  scaler.update(number(2));
  for (const Tensor& p : plain) p.mutable_grad() = at::ones_like(p);
  other.step();
  other.step();
  CHECK(equal(params, plain));
  CHECK(scaler.get_scale() == 1);
  CHECK(scaler.state().is_empty());
  scaler.load_state(small_scaler().state());
  CHECK(scaler.get_scale() == 1);
}

TEST_CASE("update takes a new scale", "[grad_scaler]") {
  const auto params = parameters();
  AdamW opt(params);
  GradScaler scaler = small_scaler();
  scaled_backward(scaler, params, 1);
  scaler.step(opt);
  scaler.update();
  const Tensor given = at::full({1}, 64.0, at::kDouble);
  scaler.update(given);
  given.fill_(7);
  CHECK(scaler.get_scale() == 64);
  CHECK(growth_tracker(scaler) == 1);
  scaler.step(opt);
  const auto saved = scaler.state();
  scaler.update(32.0);  // allows the next step
  CHECK(saved["scale"].item<double>() == 64);
  CHECK(scaler.scale(at::full({}, 2.0)).item<double>() == 64);
  scaler.step(opt);
  for (const double bad : {0.0, -1.0, kInf, std::nan(""), 1e60}) {
    CHECK_THROWS_WITH(scaler.update(bad),
                      Contains("GradScaler: new_scale: expected a finite fp32 number above"));
  }
  CHECK_THROWS_WITH(scaler.update(at::ones({2})),
                    Contains("GradScaler: new_scale: expected a tensor with one element that requires no "
                             "gradient, received shape [2], requires_grad=false"));
  CHECK_THROWS_WITH(scaler.update(at::ones({1}).requires_grad_()), Contains("requires_grad=true"));
  CHECK_THROWS_WITH(scaler.update(Tensor()), Contains("received an undefined one"));
  CHECK(scaler.get_scale() == 32);
}

TEST_CASE("GradScaler refuses options that are out of range", "[grad_scaler]") {
  const auto make = [](const GradScalerOptions& options) { GradScaler scaler(options); };
  using Options = GradScalerOptions;
  CHECK_THROWS_WITH(make(Options().init_scale(0)), Contains("GradScaler: init_scale: expected a finite fp32 "
                                                            "number above 0, received 0"));
  CHECK_THROWS_WITH(make(Options().growth_factor(1)), Contains("GradScaler: growth_factor: expected a finite "
                                                               "number above 1, received 1"));
  CHECK_THROWS_WITH(make(Options().backoff_factor(1)),
                    Contains("GradScaler: backoff_factor: expected a number "
                             "above 0 and below 1, received 1"));
  CHECK_THROWS_WITH(make(Options().backoff_factor(0)), Contains("GradScaler: backoff_factor"));
  CHECK_THROWS_WITH(make(Options().growth_factor(std::nan(""))), Contains("GradScaler: growth_factor"));
  CHECK_THROWS_WITH(make(Options().growth_interval(0)), Contains("GradScaler: growth_interval: expected a "
                                                                 "number from 1 to 2147483647, received 0"));
}

TEST_CASE("a loaded GradScaler continues", "[grad_scaler]") {
  const auto params = parameters();
  SGD opt(params);
  const auto run = [&](GradScaler& scaler, double gradient) {
    opt.zero_grad();
    scaled_backward(scaler, params, gradient);
    scaler.step(opt);
    scaler.update();
  };
  for (const bool archive : {false, true}) {
    for (const bool begun : {false, true}) {
      CAPTURE(archive, begun);
      GradScaler scaler(
          GradScalerOptions().init_scale(4096).growth_factor(4).backoff_factor(0.25).growth_interval(3));
      for (const double gradient : {kInf, 1.0, 1.0}) run(scaler, gradient);
      GradScaler loaded;
      if (begun) run(loaded, 1);
      if (archive) {
        std::stringstream file;
        torch::serialize::OutputArchive out;
        scaler.save(out);
        out.save_to(file);
        torch::serialize::InputArchive in;
        in.load_from(file);
        loaded.load(in);
      } else {
        loaded.load_state(scaler.state());
      }
      CHECK(loaded.get_scale() == 1024);
      CHECK(growth_tracker(loaded) == 2);
      run(loaded, 1);  // the third step in a row without a skipped one
      CHECK(loaded.get_scale() == 4096);
      run(loaded, kInf);
      CHECK(loaded.get_scale() == 1024);
      CHECK(scaler.get_scale() == 1024);  // the two scalers share no tensors
      CHECK(growth_tracker(scaler) == 2);
    }
  }
}

TEST_CASE("GradScaler refuses a state that is not one", "[grad_scaler]") {
  GradScaler scaler = small_scaler();
  const auto with = [](const char* name, const Tensor& value) {
    auto state = GradScaler().state();
    state[name] = value;
    return state;
  };
  CHECK_THROWS_WITH(scaler.load_state(shoestring::TensorDict()),
                    Contains("GradScaler: load_state: expected the state of a scaler, "
                             "received an empty one. It may come from a disabled"));
  shoestring::TensorDict partial;
  partial.insert("scale", at::ones({}));
  CHECK_THROWS_WITH(scaler.load_state(partial), Contains("expected a tensor with one element called "
                                                         "growth_factor, received none"));
  CHECK_THROWS_WITH(scaler.load_state(with("scale", at::ones({2}))),
                    Contains("called scale, received shape [2]"));
  CHECK_THROWS_WITH(scaler.load_state(with("scale", Tensor())), Contains("called scale, received none"));
  CHECK_THROWS_WITH(scaler.load_state(with("scale", number(kInf))),
                    Contains("GradScaler: scale: expected a finite"));
  CHECK_THROWS_WITH(scaler.load_state(with("growth_factor", number(0.5))), Contains("growth_factor"));
  CHECK_THROWS_WITH(scaler.load_state(with("growth_interval", number(2.5))),
                    Contains("growth_interval: expected a whole number from 0 to 2147483647, received 2.5"));
  CHECK_THROWS_WITH(scaler.load_state(with("_growth_tracker", number(-1))), Contains("_growth_tracker"));
  CHECK_THROWS_WITH(scaler.load_state(with("_growth_tracker", number(NAN))), Contains("_growth_tracker"));
  CHECK(scaler.get_scale() == 1024);
  CHECK(scaler.state()["growth_interval"].item<int64_t>() == 2);
}
