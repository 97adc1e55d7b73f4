#include "catch.h"

#include <cmath>
#include <sstream>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/serialize.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <shoestring/optim.h>

using at::Tensor;
using Catch::Contains;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using shoestring::optim::AdamW;
using shoestring::optim::Lion;
using shoestring::optim::LionOptions;
using shoestring::optim::LionParamState;
using shoestring::optim::SGD;
using shoestring::optim::SGDOptions;
using shoestring::optim::SGDParamState;

namespace {

// Sizes with a partial register, a partial block, several blocks and nothing.
std::vector<Tensor> parameters(at::ScalarType dtype = at::kFloat) {
  at::manual_seed(3);
  std::vector<Tensor> params;
  for (int64_t size : {1, 300, 5000, 0}) params.push_back(at::randn({size}).to(dtype).requires_grad_());
  return params;
}

void new_gradients(const std::vector<Tensor>& params, int step) {
  at::manual_seed(100 + step);
  for (const Tensor& p : params) p.mutable_grad() = at::randn(p.sizes()).to(p.scalar_type());
}

void train(torch::optim::Optimizer& opt, const std::vector<Tensor>& params, int from, int to) {
  for (int step = from; step < to; ++step) {
    new_gradients(params, step);
    opt.step();
  }
}

double grad_norm(const std::vector<Tensor>& params) {
  double squares = 0;
  for (const Tensor& p : params) squares += p.grad().square().sum().item<double>();
  return std::sqrt(squares);
}

// How far `params` are from `exact`, as a share of how far `exact` have moved from the start.
double distance(const std::vector<Tensor>& params, const std::vector<Tensor>& exact) {
  const auto start = parameters();
  double off = 0, moved = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    off += (params[i].detach().to(at::kDouble) - exact[i].detach()).square().sum().item<double>();
    moved += (exact[i].detach().to(at::kDouble) - start[i].detach()).square().sum().item<double>();
  }
  return std::sqrt(off / moved);
}

std::string saved(const torch::optim::Optimizer& opt) {
  std::stringstream file;
  torch::serialize::OutputArchive out;
  opt.save(out);
  out.save_to(file);
  return file.str();
}

void load(torch::optim::Optimizer& opt, const std::string& bytes) {
  std::stringstream file(bytes);
  torch::serialize::InputArchive in;
  in.load_from(file);
  opt.load(in);
}

template <class State>
const State& state_of(torch::optim::Optimizer& opt, const Tensor& p) {
  return static_cast<const State&>(*opt.state().at(p.unsafeGetTensorImpl()));
}

// All that differs from the defaults has to come back from the archive.
template <class Optimizer, class Options>
void check_resume(const Options& set) {
  for (const char* kind : {"8bit", "fp32"}) {
    for (auto dtype : {at::kFloat, at::kBFloat16}) {
      CAPTURE(kind, dtype);
      auto through = parameters(dtype), resumed = parameters(dtype);
      Optimizer opt(through, Options(set).state(kind));
      train(opt, through, 0, 3);
      const std::string bytes = saved(opt);
      for (size_t i = 0; i < through.size(); ++i) resumed[i].detach().copy_(through[i].detach());
      Optimizer other(resumed);
      load(other, bytes);
      train(opt, through, 3, 6);
      train(other, resumed, 3, 6);
      for (size_t i = 0; i < through.size(); ++i) CHECK(at::equal(through[i], resumed[i]));
    }
  }
}

template <class Optimizer, class Options>
void check_groups() {
  auto params = parameters();
  Groups groups;
  groups.emplace_back(std::vector<Tensor>{params[0], params[1]});
  groups.emplace_back(std::vector<Tensor>{params[2]}, std::make_unique<Options>(Options(0).state("fp32")));
  Optimizer opt(groups, Options(0.125));
  opt.add_param_group({std::vector<Tensor>{params[3]}, std::make_unique<Options>(Options(0.5))});
  CHECK(opt.param_groups()[2].options().get_lr() == 0.5);
  const Tensor still = params[2].detach().clone(), unused = params[0].detach().clone();
  const Tensor moves = params[1].detach().clone();
  const Tensor loss = opt.step([&] {
    opt.zero_grad();
    Tensor sum = params[1].sum() + params[2].sum();
    torch::autograd::backward({sum}, {});
    return sum;
  });
  CHECK(at::equal(loss, moves.sum() + still.sum()));
  CHECK(at::equal(params[2], still));  // lr = 0
  CHECK(at::equal(params[0], unused));
  CHECK(at::allclose(params[1], moves - 0.125));  // both rules' first step along a gradient of ones
  CHECK(opt.state().count(params[0].unsafeGetTensorImpl()) == 0);
  CHECK(opt.state().count(params[2].unsafeGetTensorImpl()) == 1);

  // Clipping: the norm over both groups is what the gradients are divided by.
  params[1].mutable_grad() = at::full({300}, 3.0f);
  params[2].mutable_grad() = at::full({5000}, 4.0f);
  opt.set_max_grad_norm(1.0);
  opt.step();
  CHECK(std::abs(opt.grad_norm().template item<double>() - std::sqrt(300 * 9.0 + 5000 * 16.0)) < 1e-3);
}

}  // namespace

TEST_CASE("optim::SGD follows LibTorch's", "[sgd]") {
  for (bool nesterov : {false, true}) {
    for (bool clipped : {false, true}) {
      CAPTURE(nesterov, clipped);
      auto exact = parameters(), fp32 = parameters(), coded = parameters();
      const double dampening = nesterov ? 0 : 0.25;
      torch::optim::SGD reference(exact, torch::optim::SGDOptions(0.05).momentum(0.8).dampening(dampening)
                                             .weight_decay(0.1).nesterov(nesterov));
      const auto options =
          SGDOptions(0.05).momentum(0.8).dampening(dampening).weight_decay(0.1).nesterov(nesterov);
      SGD opt(fp32, SGDOptions(options).state("fp32")), small(coded, options);
      if (clipped) {
        opt.set_max_grad_norm(0.5);
        small.set_max_grad_norm(0.5);
      }
      for (int step = 0; step < 10; ++step) {
        new_gradients(exact, step);
        if (clipped) {
          const double norm = grad_norm(exact);
          for (const Tensor& p : exact) p.mutable_grad().mul_(0.5 / (norm + 1e-6));
        }
        reference.step();
        train(opt, fp32, step, step + 1);
        train(small, coded, step, step + 1);
      }
      CHECK(distance(fp32, exact) < 1e-6);
      const double far = distance(coded, exact);
      CHECK(far < 0.02);
      CHECK(far > 1e-5);
      const auto& state = state_of<SGDParamState>(small, coded[1]);
      CHECK(state.momentum_buffer().scalar_type() == at::kByte);
      CHECK(state.momentum_buffer_scale().numel() == 2);
      CHECK(state.step().item<float>() == 10);
      // All of the codes are one allocation.
      CHECK(state.momentum_buffer().storage().nbytes() == 256 * (1 + 2 + 20));
    }
  }
}

TEST_CASE("optim::Lion agrees with fp64", "[lion]") {
  for (bool maximize : {false, true}) {
    CAPTURE(maximize);
    auto fp32 = parameters(), coded = parameters();
    std::vector<Tensor> exact, m;
    for (const Tensor& p : fp32) {
      exact.push_back(p.detach().to(at::kDouble));
      m.push_back(at::zeros_like(exact.back()));
    }
    const auto options = LionOptions(0.01).betas({0.8, 0.95}).weight_decay(0.2).maximize(maximize);
    Lion opt(fp32, LionOptions(options).state("fp32")), small(coded, options);
    if (maximize) {  // and clip, which shows in the moment
      opt.set_max_grad_norm(0.5);
      small.set_max_grad_norm(0.5);
    }
    for (int step = 0; step < 10; ++step) {
      train(opt, fp32, step, step + 1);
      train(small, coded, step, step + 1);
      const double factor = maximize ? -0.5 / (grad_norm(fp32) + 1e-6) : 1;
      for (size_t i = 0; i < exact.size(); ++i) {
        const Tensor g = fp32[i].grad().to(at::kDouble) * factor;
        exact[i] = exact[i] * (1 - 0.01 * 0.2) - 0.01 * (0.8 * m[i] + 0.2 * g).sign();
        m[i] = 0.95 * m[i] + 0.05 * g;
      }
    }
    CHECK(distance(fp32, exact) < 2e-5);  // one wrong sign would be 7e-3
    // A sign near zero may fall otherwise: a few weights are then off by twice the step.
    const double far = distance(coded, exact);
    CHECK(far < 0.15);
    CHECK(far > 1e-4);
    const auto& state = state_of<LionParamState>(small, coded[1]);
    CHECK(state.exp_avg().scalar_type() == at::kByte);
    CHECK(state.exp_avg_scale().numel() == 2);
    CHECK(!state_of<LionParamState>(opt, fp32[1]).exp_avg_scale().defined());
    CHECK((state_of<LionParamState>(opt, fp32[1]).exp_avg() - m[1]).norm().item<double>() <
          1e-6 * m[1].norm().item<double>());
  }
}

TEST_CASE("Lion and SGD resume bit for bit from an archive", "[lion][sgd]") {
  check_resume<Lion>(LionOptions(3e-3).betas({0.7, 0.9}).weight_decay(0.3).maximize(true));
  check_resume<SGD>(SGDOptions(3e-2).momentum(0.7).dampening(0.2).weight_decay(0.3).maximize(true));
  check_resume<SGD>(SGDOptions(3e-2).nesterov(true));
}

TEST_CASE("AdamW's first archives, which do not name the optimizer, still load as AdamW's alone", "[adamw][lion]") {
  auto through = parameters(), resumed = parameters();
  AdamW opt(through), other(resumed);
  train(opt, through, 0, 2);
  torch::serialize::OutputArchive out;
  out.write("format_version", c10::IValue(int64_t{1}));
  torch::optim::serialize<shoestring::optim::AdamWParamState, shoestring::optim::AdamWOptions>(out, opt);
  std::stringstream file;
  out.save_to(file);
  for (size_t i = 0; i < through.size(); ++i) resumed[i].detach().copy_(through[i].detach());
  load(other, file.str());
  train(opt, through, 2, 4);
  train(other, resumed, 2, 4);
  for (size_t i = 0; i < through.size(); ++i) CHECK(at::equal(through[i], resumed[i]));
  Lion lion(through);
  CHECK_THROWS_WITH(load(lion, file.str()), Contains("received AdamW's, format_version 1"));
}

TEST_CASE("Lion and SGD: groups, closures and clipping", "[lion][sgd]") {
  check_groups<Lion, LionOptions>();
  check_groups<SGD, SGDOptions>();
}

TEST_CASE("Lion and SGD refuse what does not fit, and change nothing", "[lion][sgd]") {
  auto params = parameters();
  CHECK_THROWS_WITH(Lion(params, LionOptions(-1)), Contains("Lion: lr: expected a number of at least 0, received -1"));
  CHECK_THROWS_WITH(Lion(params, LionOptions().betas({0.9, 1})), Contains("Lion: betas: expected two numbers in [0, "));
  CHECK_THROWS_WITH(Lion(params, LionOptions().state("4bit")), Contains("Lion: state: expected \"8bit\" or \"fp32\""));
  CHECK_THROWS_WITH(SGD(params, SGDOptions().weight_decay(-2)), Contains("SGD: weight_decay: expected a number of at"));
  CHECK_THROWS_WITH(SGD(params, SGDOptions().momentum(0)),
                    Contains("SGD: momentum: expected a number above 0 (without momentum use torch::optim::SGD)"));
  CHECK_THROWS_WITH(SGD(params, SGDOptions().nesterov(true).dampening(0.5)),
                    Contains("SGD: dampening: expected 0 with nesterov, received 0.5"));
  CHECK_THROWS_WITH(SGD(params, SGDOptions().dampening(NAN)), Contains("SGD: dampening: expected a finite number"));

  Groups foreign;
  foreign.emplace_back(params, std::make_unique<torch::optim::SGDOptions>(0.1));
  CHECK_THROWS_WITH(SGD(foreign), Contains("expected shoestring::optim::SGDOptions in every group, received those of"));

  // Lion's names and AdamW's overlap: without the archive's own word, one would be read as the other.
  AdamW adamw(params);
  train(adamw, params, 0, 1);
  Lion lion(params, LionOptions(0.25));
  CHECK_THROWS_WITH(load(lion, saved(adamw)),
                    Contains("Lion: load: expected an archive of this optimizer, format_version 1, received AdamW's"));
  CHECK(lion.state().empty());
  CHECK(lion.param_groups()[0].options().get_lr() == 0.25);
  CHECK_THROWS_WITH(load(adamw, saved(lion)), Contains("received Lion's"));

  // State of another shape is refused at the step, before anything has moved.
  std::vector<Tensor> wider{at::zeros({7}), at::zeros({300}), at::zeros({5000}), at::zeros({0})};
  for (Tensor& p : wider) p.requires_grad_();
  train(lion, params, 0, 1);
  Lion other(wider);
  load(other, saved(lion));
  new_gradients(wider, 0);
  CHECK_THROWS_WITH(other.step(), Contains("Lion: exp_avg: the state of parameter 0 does not fit state=\"8bit\""));
  CHECK(wider[1].count_nonzero().item<int64_t>() == 0);
}
