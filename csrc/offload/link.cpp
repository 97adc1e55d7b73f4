// Measures the speed of an ActivationStore's copies while a computation runs, since training copies
// activations during computation. On a CPU the copies compete with the computation for cores.

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <vector>

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu.h>

#include "core/device.h"
#include "offload/activation_core.h"

namespace shoestring::offload {
namespace {

using Clock = std::chrono::steady_clock;

// number of measured runs, whose median is the result; an extra run before them allocates memory and files
constexpr int kRuns = 5;
constexpr int kPieces = 4;
constexpr int kLayers = 20;

int64_t piece_bytes(c10::Device device) { return int64_t{is_asynchronous(device) ? 32 : 4} << 20; }

double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

// A computation to run beside the copies: a matrix product and an elementwise operator, as in a layer. It
// runs on all cores or on the GPU.
class Computation {
 public:
  explicit Computation(c10::Device device)
      : device_(device), a_(at::ones({256, 384}, device)), b_(at::ones({384, 1152}, device)) {
    alone_ = std::numeric_limits<double>::infinity();
    for (int run = 0; run < kRuns; ++run) {
      const auto began = Clock::now();
      for (int i = 0; i < kLayers; ++i) once();
      alone_ = std::min(alone_, seconds_since(began) / kLayers);
    }
  }

  struct Beside {
    // seconds: time until the copies were done; lost: time by which the copies delayed the computation
    double seconds = 0, lost = 0;
  };
  template <class Begin, class Done>
  Beside beside(const Begin& begin, const Done& done) const {
    const auto began = Clock::now();
    begin();
    int64_t count = 0;
    for (; !done(); ++count) once();
    const double seconds = seconds_since(began);
    return {seconds, std::max(0.0, seconds - static_cast<double>(count) * alone_)};
  }

 private:
  void once() const {
    at::silu(at::mm(a_, b_));
    synchronize(device_);
  }

  const c10::Device device_;
  const at::Tensor a_, b_;
  double alone_;
};

}  // namespace

LinkSpeed ActivationStore::measure_link(int64_t bytes) const {
  const at::NoGradGuard no_grad;
  const bool to_disk = core_->file && bytes > core_->host_bytes;
  const auto core = std::make_shared<ActivationStoreCore>(
      core_->device, core_->compression, /*prefetch=*/1, /*max_pending=*/1,
      /*min_bytes=*/0, to_disk ? core_->folder : "", /*host_bytes=*/0);
  const Computation computation(core->device);
  const int64_t moved = kPieces * piece_bytes(core->device);
  std::vector<at::Tensor> pieces;
  for (int i = 0; i < kPieces; ++i) {
    pieces.push_back(at::ones({piece_bytes(core->device) / 4}, at::TensorOptions().device(core->device)));
  }
  core->marked = true;  // put all offloaded tensors in one layer, so that nothing is prefetched
  std::vector<Computation::Beside> outs, ins;
  for (int run = 0; run <= kRuns; ++run) {
    std::vector<std::shared_ptr<ActivationEntry>> entries;
    const auto all = [&](auto fence) {
      return [&entries, fence] {
        return std::all_of(entries.begin(), entries.end(),
                           [&](const auto& e) { return (e.get()->*fence)->is_done(); });
      };
    };
    outs.push_back(computation.beside(
        [&] {
          const ActivationTurn turn(core);
          for (const at::Tensor& piece : pieces) entries.push_back(core->entry_of(piece));
        },
        all(&ActivationEntry::out)));
    // synchronize() throws if a copy failed; is_done() does not.
    for (const auto& e : entries) e->out->synchronize();
    ins.push_back(computation.beside(
        [&] {
          const ActivationTurn turn(core);
          for (const auto& e : entries) core->begin_in(*e);
        },
        all(&ActivationEntry::in)));
    for (const auto& e : entries) e->in->synchronize();
    const ActivationTurn turn(core);
    entries.clear();
  }
  const auto median = [](std::vector<Computation::Beside>& of) {
    std::sort(of.begin() + 1, of.end(), [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
    return of[1 + kRuns / 2];
  };
  const Computation::Beside out = median(outs), in = median(ins);
  const auto rate = [&](const Computation::Beside& one) { return static_cast<double>(moved) / one.seconds; };
  return {rate(out), rate(in), std::min(1.0, (out.lost + in.lost) / (out.seconds + in.seconds)),
          std::max<int64_t>(1, core_->prefetch)};
}

}  // namespace shoestring::offload
