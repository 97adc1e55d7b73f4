#include <cmath>
#include <cstdio>
#include <string>

#include <ATen/ATen.h>

#include <shoestring/shoestring.h>

// Tests the installed C++ API as another project would use it. Prints an "ok" or "not ok" line per check, and
// returns the number of failures.
int main() {
  int failures = 0;
  const auto check = [&failures](bool good, const char* what) {
    std::printf("%s %s\n", good ? "ok" : "not ok", what);
    failures += !good;
  };
  at::manual_seed(0);
  at::Tensor hidden = at::randn({64, 32}).requires_grad_(), weight = at::randn({500, 32}).requires_grad_();
  at::Tensor target = at::randint(500, {64});
  at::Tensor loss = shoestring::linear_cross_entropy(hidden, weight, target);
  at::Tensor plain = at::cross_entropy_loss(at::linear(hidden, weight), target);
  check(std::abs(loss.item<double>() - plain.item<double>()) < 1e-5,
        "linear_cross_entropy equals cross_entropy(linear)");
  loss.backward();
  check(weight.grad().defined() && weight.grad().sizes() == weight.sizes(), "backward fills weight.grad");

  const auto error_of = [](const auto& call) {
    try {
      call();
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string();
  };
  const auto twice = [](const at::Tensor& x) { return x + x; };
  check(error_of([&] { shoestring::checkpoint(twice, hidden); }).find("install_autograd_engine()") !=
            std::string::npos,
        "checkpoint names install_autograd_engine() where it is missing");
  check(error_of([] { shoestring::install_autograd_engine(); }).find("a backward pass") != std::string::npos,
        "install_autograd_engine() refuses after a backward pass");

  using shoestring::optim::AdamWOptions;
  shoestring::optim::AdamW optimizer({weight}, AdamWOptions(0.5).weight_decay(0).state_format("bf16"));
  const at::Tensor before = weight.detach().clone();
  optimizer.step();
  const double moved = (before - weight).abs().mean().item<double>();
  check(std::abs(moved - 0.5) < 0.01, "AdamW moves every weight by lr in its first step");
  check(dynamic_cast<AdamWOptions*>(&optimizer.param_groups()[0].options()) != nullptr,
        "its options are AdamWOptions");
  return failures;
}
