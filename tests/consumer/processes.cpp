#include <cstdio>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include <shoestring/distributed/distributed.h>

// Tests data parallelism as another project would use it, in as many processes as the environment says. A
// library that was built without Gloo's headers says so, which is no failure.
int main() {
  using namespace shoestring::distributed;
  try {
    const auto group = init_process_group(ProcessGroupOptions().timeout(std::chrono::seconds(20)));
    torch::nn::Linear model(4, 2);
    DataParallel parallel(*model, group);
    parallel.backward(model->forward(at::ones({3, 4})).sum());
    const bool good = model->weight.grad().eq(3).all().item<bool>();
    std::printf("%s gradients are averaged over the processes\n", good ? "ok" : "not ok");
    return good ? 0 : 1;
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    const bool lacks = text.find("expected a build with Gloo") != std::string::npos;
    std::printf("%s %s\n", lacks ? "ok" : "not ok", text.c_str());
    return lacks ? 0 : 1;
  }
}
