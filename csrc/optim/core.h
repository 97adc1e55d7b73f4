#pragma once

// What LowMemoryOptimizer does: steps (base.cpp), and what happens to gradients before one (gradients.cpp).

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "optim/arena.h"

namespace shoestring::optim::detail {

/// A group's arenas, and the parameters that have never had a gradient.
struct Layout {
  std::vector<Arena> arenas;
  std::vector<Tensor> absent;
};

/// A parameter's address, by which LibTorch knows its state.
using Key = c10::TensorImpl*;

inline std::optional<Tensor> some(const Tensor& t) {
  return t.defined() ? std::optional<Tensor>(t) : std::nullopt;
}

/// The backwards whose gradients hooks have taken, by the number of their graph task.
struct Backwards {
  std::mutex mutex;
  std::set<int> open;
  bool failed = false;
};

struct Core : std::enable_shared_from_this<Core> {
  explicit Core(LowMemoryOptimizer& optimizer) : optimizer(&optimizer) {}

  // ---- steps

  LowMemoryOptimizer* optimizer;               // which may move
  std::unordered_map<size_t, Layout> layouts;  // by the group's position

  const char* name() const;  // of the class
  const LowMemoryOptions& options(size_t group) const;
  const Rule& rule(size_t group) const { return Access::rule(options(group)); }
  const ParamState* state(const Tensor& param) const;
  /// The group's arenas: of parameters that have state or a gradient (or will have, in backward).
  Layout& layout(size_t group);
  Tensor step();
  Tensor scaled_step(const Tensor& scale, const Tensor& skip);
  void step_arena(size_t group, Arena& arena, const std::vector<Tensor>& grads, const Tensor& accumulated,
                  const Tensor& clip_coef);

  std::string offload;  // "": on the device
  bool on_cpu() const { return offload == "cpu"; }
  bool streams() const { return !offload.empty() && !on_cpu(); }
  /// What the arenas on a device share; null where nothing is offloaded.
  c10::intrusive_ptr<offload::Offload> offload_of(at::Device device);
  void set_offload(const std::string& where);
  /// Makes room on the disk for the state of all trainable parameters of the groups from `first` on.
  void reserve(size_t first);
  /// Waits until all stepped state is back in host memory or in the file.
  void bring_back();
  /// The same for what is going to be read or saved. Raises where a step that failed has stepped some
  /// parameters.
  void settle();
  /// After zero_grad: drops what is left of a step or backward that failed, where its parameters have not
  /// been stepped.
  void discard();

  // ---- gradients

  std::optional<double> max_grad_norm;
  Tensor grad_norm;
  bool step_in_backward = false, accumulating = false;
  at::ScalarType accumulate_dtype = at::kFloat;

  /// Hooks on parameters, where gradients are not simply left in grad().
  void watch(const std::vector<Tensor>& params);
  void on_gradient(const Tensor& param);
  /// After a load.
  void forget();

  // ---- steps by the CPU (host.cpp)

  void flush();
  void drain();
  /// Before the first gradients are added up: raises where the last step has not been finished.
  void begin_sums();

 private:
  struct Members {  // of a group, of one kind
    Kind kind;
    std::vector<Tensor> params;
    std::vector<int64_t> numbers;
  };
  struct Call {  // an arena, its parameters' gradients, and what the step itself adds to them
    size_t group;
    Arena* arena;
    std::vector<Tensor> grads;
    Tensor accumulated;
  };
  struct Alone {
    size_t group;
    Arena arena;
  };

  struct Bucket {  // parameters of an arena, side by side, that the CPU steps together
    size_t group;
    Arena* arena;
    size_t first, last;
    std::set<size_t> arrived{};  // whose gradient is on its way
    std::set<size_t> given{};    // whose gradient of this step has come
    bool steps = false;          // the job
    offload::FencePtr job{};
    struct Result {
      size_t index;
      Tensor grad, norm;
      bool is_sum;
    };
    std::vector<Result> results{};  // of the job
  };

  using Versions = std::vector<std::pair<Tensor, uint32_t>>;  // of gradients

  void step_values(size_t group, const Arena& arena, const std::vector<Tensor>& grads,
                   const Tensor& accumulated, const Tensor& clip_coef);
  struct Unfinished {  // a step that is under way, or failed
    std::vector<Call> calls;
    size_t done;  // calls
    Tensor coefficient, grad_scale, found_inf;
    Versions gradients;
  };
  enum class Broken {
    kNone,
    kSums,
    kWeights
  };  // what an error has left half-done, but for an unfinished step

  std::vector<Members> members(size_t group, c10::function_ref<bool(const Tensor&)> belongs) const;
  void check_process() const;
  Versions versions() const;
  Unfinished begin_step();
  Tensor finish_step(Unfinished step);
  bool is_resumed() const;
  bool has_stepped(const Unfinished& step) const;
  void abandon();
  void begin_backward();
  void end_backward();
  void check_whole(const char* what) const;
  void drop_all_sums();
  bool has_gradient(const Tensor& param) const;
  bool is_pending(const Tensor& param) const { return pending_.count(param.unsafeGetTensorImpl()) > 0; }
  bool any_pending(const Arena& arena) const;
  void add(const Tensor& param);
  std::vector<Tensor> into_arena(Arena& arena);
  void gather(Call& call);
  void find_inf(const std::vector<Call>& calls);
  void drop_sums();
  static std::vector<Tensor> gradients_of(const std::vector<Call>& calls);
  Tensor clip(const std::vector<Call>& calls);
  static std::vector<Bucket> buckets(size_t group, Arena& arena);
  std::vector<Tensor> on_host(Arena& arena, std::vector<Tensor> grads);
  void step_on_host(size_t group, Arena& arena, std::vector<Tensor> grads, const Tensor& accumulated,
                    const Tensor& clip_coef);
  void step_bucket(const Bucket& bucket, const std::vector<Tensor>& grads, bool summed,
                   const Tensor& clip_coef);
  void arrive(const Tensor& param);
  void find_buckets();
  void drop_buckets();
  void send_job(Bucket& bucket);
  void send_jobs();
  void step_alone(const Tensor& param);
  void find_alone();
  void finish_backward();

  std::map<at::Device, c10::intrusive_ptr<offload::Offload>, bool (*)(at::Device, at::Device)> offloads_{
      [](at::Device a, at::Device b) { return a.str() < b.str(); }};
  std::optional<Unfinished> unfinished_;
  Broken broken_ = Broken::kNone;
  bool stepped_in_backward_ = false;  // any parameter, by the last backward
  const std::shared_ptr<Backwards> backwards_ = std::make_shared<Backwards>();
  Tensor grad_scale_, found_inf_;         // of a scaled step, while it runs; the latter whether to skip
  std::unordered_map<Key, Tensor> sums_;  // of gradients, views of arenas once there are any
  std::unordered_set<Key> pending_;       // parameters whose sum is not empty
  std::vector<Tensor> used_;              // sums that stand for gradients, and have to become zero
  std::unordered_set<Key> watched_;
  std::unordered_map<Key, Alone> alone_;  // in backward: each parameter's state
  std::vector<Tensor> norms_;             // of gradients that have been freed
  std::mutex mutex_;                      // backward has a thread for each device
  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::unordered_map<Key, std::pair<Bucket*, size_t>>
      bucket_of_;                              // and which of the arena's parameters it is
  std::vector<Bucket*> jobs_;                  // with gradients on their way, or a job
  std::unordered_map<Key, Tensor> collected_;  // gradients in host memory, which wait for the norm of all
  std::unordered_map<const void*, Tensor> known_norms_;  // of those, by address
  std::unique_ptr<offload::CopyLane> worker_;            // the last: it ends first
};

}  // namespace shoestring::optim::detail
