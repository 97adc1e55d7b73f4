// Splits the parameters of blocks over processes, and gathers them while a block runs.

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <shoestring/distributed/distributed.h>

#include "distributed/backends.h"
#include "distributed/compressor.h"
#include "distributed/flat_block.h"
#include "offload/block_runs.h"
#include "optim/split/split_params.h"

namespace shoestring::distributed {
namespace {

using at::Tensor;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr const char* kName = kFullyShard;
constexpr size_t kSumsUnderWay = 1;  // sums of gradients that are under way at the same time

struct Block {
  Flats flats;
  offload::BlockUses uses;
  bool keep = false;     // whether the weights stay from forward to the end of backward
  bool is_kept = false;  // whether they stay now
  bool is_here = false;
  bool has_ended = false;  // its backward, in the pass that runs now
  bool has_memory() const { return !flats.empty() && flats[0].memory.defined(); }
};

struct Sent {
  Flat* flat;
  Tensor whole, part;
  WorkPtr work;
  Compressor::Scatter scatter;  // scatters compressed gradients
};

}  // namespace

struct FullyShard::Impl final : offload::BlockRuns, std::enable_shared_from_this<FullyShard::Impl> {
  struct Hook final : torch::autograd::PostAccumulateGradHook {
    std::weak_ptr<Impl> impl;
    size_t block, flat, piece;
    std::unique_ptr<PostAccumulateGradHook> before;  // a tensor has room for one hook only

    void operator()(const Tensor& param) override {
      if (before != nullptr) (*before)(param);
      const auto alive = impl.lock();
      if (alive != nullptr && param.grad().defined()) alive->take(block, flat, piece, param);
    }
  };

  Impl(GroupPtr ranks, const FullyShardOptions& o) : group(std::move(ranks)), options(o), parts(o.offload()) {
    TORCH_CHECK_VALUE(group.defined(), kName, ": group: expected a process group, received none");
    name = registered_name(group);
    const int64_t bits = bits_of(options.compress(), kName);
    const GroupPtr& averages = options.replicas() ? options.replicas() : group;
    // The gradients of one process are not sent, so nothing is compressed.
    if (bits > 0 && averages->getSize() > 1) compressor.emplace(averages, bits);
  }

  using BlockRuns::mutex;

  int64_t rank() const { return group->getRank(); }
  int64_t ranks() const { return group->getSize(); }
  int64_t replicas() const { return options.replicas() ? options.replicas()->getSize() : 1; }
  // Whether codes replace the reduce-scatter; with replicas they replace the all-reduce.
  bool compresses_parts() const { return compressor && !options.replicas(); }
  // The factor of gradients before they are sent. The Compressor divides by the ranks over which it averages.
  double scale() const {
    if (compresses_parts()) return 1;
    return 1.0 / static_cast<double>(ranks() * (compressor ? 1 : replicas()));
  }

  Block& numbered(int64_t index) {
    TORCH_CHECK(index >= 0 && index < count(), kName, ": block: expected one of ", blocks.size(),
                " blocks, received ", index);
    return *blocks[static_cast<size_t>(index)];
  }

  // ---- BlockRuns

  offload::BlockUses& uses_of(int64_t index) override { return numbered(index).uses; }
  int64_t count() const override { return static_cast<int64_t>(blocks.size()); }
  std::weak_ptr<BlockRuns> self() override { return weak_from_this(); }
  bool repeats() const override { return false; }  // an optimizer may step before the next forward

  void fetch(int64_t index) override {
    Block& b = numbered(index);
    b.is_kept |= b.keep && at::GradMode::is_enabled();
    check_frozen(b, index);
    if (b.is_here) return;
    if (!b.has_memory()) begin_in(b);
    for (Flat& f : b.flats) {
      wait_for(group, std::exchange(f.arrival, nullptr), c10::str(kName, ": weights"));
      parts.let_go(f);
    }
    place(index, b, /*is_here=*/true);
  }

  static void check_frozen(const Block& b, int64_t index) {
    for (const Flat& f : b.flats) {
      for (size_t i = 0; !f.is_trained && i < f.pieces.size(); ++i)
        TORCH_CHECK(
            !f.pieces[i].tensor.requires_grad(), kName, ": block ", index,
            ": expected weights that stay frozen, received one of ", f.pieces[i].tensor.sizes(),
            " that was frozen at add() and is trained now; add it trained, with find_unused(true), and "
            "freeze it afterwards");
    }
  }

  void fetch_all() {
    const at::NoGradGuard no_grad;  // no backward follows, to whose end blocks would be kept
    for (int64_t i = 0; i < count(); ++i) {
      ++numbered(i).uses.count;  // the next fetch must not free the block
      fetch(i);
    }
  }

  void prefetch(int64_t index, int64_t direction) override {
    if (index < 0 || index >= count() || numbered(index).has_memory()) return;
    // A kept block, which runs several times, may come after all others.
    if (direction < 0 && numbered(index).has_ended) return;
    begin_in(numbered(index));
    if (const int64_t next = index + direction; next >= 0 && next < count())
      for (const Flat& f : numbered(next).flats) parts.will_need(f);
  }

  // Ranks send gradients and gather weights in the same order, whatever the order of their gradients.
  void ended(int64_t index) override {
    const at::NoGradGuard no_grad;
    numbered(index).has_ended = true;
    for (Flat& f : numbered(index).flats)
      if (f.is_trained && (f.gradients.defined() || options.find_unused())) complete(index, f);
  }

  void ended_pass() override {
    const at::NoGradGuard no_grad;
    for (int64_t i = count() - 1; i >= 0; --i) {
      for (Flat& f : numbered(i).flats)
        if (f.gradients.defined()) complete(i, f);
    }
    while (!under_way.empty()) receive_first();
    for (const auto& b : blocks) {
      b->is_kept = b->has_ended = false;
      leave_idle(*b);  // the next steps change the weights
    }
  }

  // An optimizer may step between a forward without gradients and the next forward.
  void end_forward(int64_t index) {
    const std::lock_guard lock(mutex);
    if (at::GradMode::is_enabled() || index + 1 < count()) return;
    for (const auto& b : blocks) leave_idle(*b);
  }

  // ---- weights

  int64_t add(const std::vector<Tensor>& tensors, bool keep) {
    const std::lock_guard lock(mutex);
    const at::NoGradGuard no_grad;
    const int64_t index = count();
    const std::string label = c10::str("block ", index);
    auto b = std::make_unique<Block>();
    b->keep = keep;
    for (const Tensor& t : tensors) check_and_insert(*b, t, label);
    TensorDict named;
    for (size_t i = 0; i < tensors.size(); ++i) named.insert(c10::str(label, ", ", i), tensors[i].detach());
    if (options.replicas()) broadcast_tensors(options.replicas(), named, kName);
    broadcast_tensors(group, named, kName);
    for (Flat& f : b->flats) parts.make(f, ranks());  // an error leaves the tensors as they are
    for (size_t f = 0; f < b->flats.size(); ++f) split(index, *b, f);
    blocks.push_back(std::move(b));
    place(index, *blocks.back(), /*is_here=*/false);
    return index;
  }

  void check_and_insert(Block& b, const Tensor& t, const std::string& label) {
    TORCH_CHECK(t.has_storage(), kName, ": ", label,
                ": expected tensors with storages, received one without");
    // A block may have a storage several times: the parts of a quantised weight, for one.
    if (t.storage().nbytes() == 0 || has_storage_of(b.flats, t)) return;
    if (compressor && t.requires_grad()) check_compressible(kName, t, c10::str("one of ", label));
    for (const auto& other_block : blocks)
      TORCH_CHECK(
          !has_storage_of(other_block->flats, t), kName, ": ", label,
          ": expected parameters of its own, received one that another block has, too; add both as one "
          "block with keep");
    insert(b.flats, t, label);
  }

  // Copies the part of this rank, and makes the tensors that optimizers step.
  void split(int64_t index, Block& b, size_t number) {
    Flat& f = b.flats[number];
    const int64_t size = f.rank_part.numel();
    const int64_t first = rank() * size, last = first + size;
    for (size_t i = 0; i < f.pieces.size(); ++i) {
      Piece& p = f.pieces[i];
      const int64_t begin = std::clamp(p.at, first, last), end = std::clamp(p.at + p.numel, first, last);
      const Tensor part = f.rank_part.narrow(0, begin - first, end - begin);
      if (end > begin) part.copy_(f.elements_of(p).narrow(0, begin - p.at, end - begin));
      if (!f.is_trained) continue;
      p.shard = part.detach().requires_grad_(true);
      std::vector<int64_t> begins;
      for (int64_t r = 0; r <= ranks(); ++r)
        begins.push_back(std::clamp(r * size - p.at, int64_t{0}, p.numel));
      optim::set_split(p.shard, {{name},
                                 rank(),
                                 p.tensor.sizes().vec(),
                                 std::move(begins),
                                 p.tensor.device().type(),
                                 options.replicas() && options.replicas()->getRank() > 0});
      auto hook = std::make_unique<Hook>();
      hook->impl = weak_from_this();
      hook->block = static_cast<size_t>(index);
      hook->flat = number;
      hook->piece = i;
      hook->before = std::move(torch::autograd::impl::post_acc_grad_hooks(p.tensor));
      torch::autograd::impl::set_post_acc_grad_hooks(p.tensor, std::move(hook));
    }
  }

  static void place(int64_t index, Block& b, bool is_here) {
    distributed::place(b.flats, c10::str("block ", index), is_here);
    b.is_here = is_here;
  }

  // Starts to gather the weights of a block, after the memory of all idle blocks has been freed.
  void begin_in(Block& b) {
    const at::NoGradGuard no_grad;
    for (const auto& other_block : blocks)
      if (other_block.get() != &b) leave_idle(*other_block);
    for (Flat& f : b.flats) {
      f.memory = buffer(f);
      received += static_cast<int64_t>(f.rank_part.nbytes()) * (ranks() - 1);
      Tensor part = f.rank_part.to(f.memory.device(), /*non_blocking=*/true);
      f.arrival = start("weights", [&] { return group->_allgather_base(f.memory, part); });
    }
  }

  void leave_idle(Block& b) {
    if (!b.uses.none() || b.is_kept || !b.has_memory()) return;
    for (Flat& f : b.flats) {
      if (f.arrival) wait_for(group, std::exchange(f.arrival, nullptr), c10::str(kName, ": weights"));
    }
    if (b.is_here) place(number_of(b), b, /*is_here=*/false);
    for (Flat& f : b.flats) keep_buffer(std::exchange(f.memory, Tensor()));
  }

  int64_t number_of(const Block& b) const {
    const auto block =
        std::find_if(blocks.begin(), blocks.end(), [&](const auto& other) { return other.get() == &b; });
    return block - blocks.begin();
  }

  // Memory of the CPU is used again, since the first write to each new page takes long. A GPU's allocator
  // does the same by itself.
  Tensor buffer(const Flat& f) {
    const int64_t numel = f.rank_part.numel() * ranks();
    const auto fits = [&](const Tensor& t) { return t.numel() == numel && t.scalar_type() == f.dtype; };
    const auto memory = std::find_if(free.begin(), free.end(), fits);
    if (memory == free.end()) {
      free.clear();
      return at::empty({numel}, at::device(f.device()).dtype(f.dtype));
    }
    Tensor t = std::move(*memory);
    free.erase(memory);
    return t;
  }

  void keep_buffer(Tensor t) {
    // Another tensor may hold the memory still, such as a view that the caller has kept.
    if (t.device().is_cpu() && t.storage().use_count() == 1 && t.use_count() == 1)
      free.push_back(std::move(t));
  }

  // ---- gradients

  // Copies the gradient of a parameter to its place, and sends the gradients of the block if they are
  // complete.
  void take(size_t block_number, size_t flat_number, size_t number, const Tensor& param) {
    const std::lock_guard lock(mutex);
    if (block_number >= blocks.size()) return;  // after restore()
    const at::NoGradGuard no_grad;
    Flat& f = blocks[block_number]->flats[flat_number];
    Piece& p = f.pieces[number];
    const Tensor grad = param.grad().reshape({-1});
    param.mutable_grad() = Tensor();
    if (!f.gradients.defined()) {
      f.gradients = clean(f);
      f.is_scaled = accumulating == 0;  // sums of several gradients are divided once, as one process does
    }
    Tensor target = f.gradients.narrow(0, p.at, p.numel);
    const double factor = f.is_scaled ? scale() : 1;
    if (p.is_sum || p.has_arrived) {
      target.add_(grad, factor);
    } else {
      at::mul_out(target, grad, at::scalar_tensor(factor));
    }
    p.has_arrived = true;
  }

  // Returns memory for gradients with zeros between the parameters.
  Tensor clean(const Flat& f) {
    Tensor whole = buffer(f);
    int64_t end = 0;
    for (const Piece& p : f.pieces) {
      whole.narrow(0, end, p.at - end).zero_();
      end = p.at + p.numel;
    }
    whole.narrow(0, end, whole.numel() - end).zero_();
    return whole;
  }

  // Sends the gradients of a block, of which backward has computed all that it will.
  void complete(int64_t index, Flat& f) {
    if (accumulating > 0) {
      for (Piece& p : f.pieces) p.is_sum |= std::exchange(p.has_arrived, false);
      return;
    }
    if (!f.gradients.defined()) f.gradients = clean(f);
    for (size_t i = 0; i < f.pieces.size(); ++i) {
      Piece& p = f.pieces[i];
      if (p.has_arrived || p.is_sum) continue;
      TORCH_CHECK(
          options.find_unused(), kName, ": block ", index,
          ": expected a backward that computes the gradients of all parameters of the block, received one "
          "that does not use parameter ",
          i, " of shape ", p.tensor.sizes(), "; freeze it before add(), or pass find_unused");
      f.gradients.narrow(0, p.at, p.numel).zero_();
    }
    send(f);
  }

  void send(Flat& f) {
    while (under_way.size() >= kSumsUnderWay) receive_first();
    Tensor whole = std::exchange(f.gradients, Tensor());
    if (!f.is_scaled) whole.mul_(scale());
    for (Piece& p : f.pieces) p.has_arrived = p.is_sum = false;
    Tensor part = at::empty({f.rank_part.numel()}, whole.options()), from = whole;
    if (f.number == 0) f.number = ++numbers;
    if (compresses_parts()) {
      under_way.push_back({&f, {}, part, {}, compressor->begin_scatter(whole, f.number)});
      keep_buffer(std::move(whole));
      return;
    }
    sent += static_cast<int64_t>(f.rank_part.nbytes()) * (ranks() - 1);
    under_way.push_back(
        {&f, whole, part, start("gradients", [&] { return group->_reduce_scatter_base(part, from); }), {}});
  }

  void receive_first() {
    Sent first = std::move(under_way.front());
    under_way.pop_front();
    if (compresses_parts()) {
      compressor->end_scatter(std::exchange(first.scatter, {}), first.part);
    } else {
      wait_for(group, first.work, c10::str(kName, ": gradients"));
      first.work = nullptr;  // it holds the memory
      keep_buffer(std::move(first.whole));
    }
    if (compressor && options.replicas()) {
      compressor->all_reduce(first.part, {}, first.flat->number, /*is_last=*/true)->wait();
    } else if (options.replicas()) {
      std::vector<Tensor> parts{first.part};
      sent += 2 * static_cast<int64_t>(first.part.nbytes()) * (replicas() - 1) / replicas();
      wait_for(options.replicas(), start("gradients", [&] { return options.replicas()->allreduce(parts); }),
               c10::str(kName, ": gradients of replicas"));
    }
    first.part = first.part.to(first.flat->rank_part.device());
    const int64_t begin = rank() * first.part.numel();
    for (Piece& p : first.flat->pieces) {
      // an empty part begins anywhere
      const int64_t at = std::clamp(p.at - begin, int64_t{0}, first.part.numel() - p.shard.numel());
      const Tensor grad = first.part.narrow(0, at, p.shard.numel()).detach();
      if (p.shard.grad().defined()) {
        p.shard.mutable_grad().add_(grad);
      } else {
        p.shard.mutable_grad() = grad;
      }
      // such as that of an optimizer that steps in backward
      if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(p.shard)) (*hook)(p.shard);
    }
  }

  template <class Issue>
  WorkPtr start(const char* what, const Issue& issue) const {
    try {
      return issue();
    } catch (const std::exception& error) {
      fail_collective(*group, error, c10::str(kName, ": ", what));
    }
  }

  const GroupPtr group;
  const FullyShardOptions options;
  PartMemory parts;
  std::string name;  // name of the group
  std::vector<std::unique_ptr<Block>> blocks;
  std::deque<Sent> under_way;
  std::vector<Tensor> free;
  int accumulating = 0;
  int64_t received = 0, sent = 0, numbers = 0;
  std::optional<Compressor> compressor;  // averages over the replicas, or over the group if there are none
};

FullyShard::FullyShard(GroupPtr group, const FullyShardOptions& options)
    : impl_(std::make_shared<Impl>(std::move(group), options)) {}

FullyShard::~FullyShard() = default;

int64_t FullyShard::add(const std::vector<Tensor>& tensors, bool keep) { return impl_->add(tensors, keep); }

Tensor FullyShard::run(int64_t block, const Tensor& x, const std::function<Tensor(const Tensor&)>& forward) {
  impl_->enter(block, {x});
  Tensor y;
  try {
    y = forward(x);
  } catch (...) {
    impl_->leave(block, {});
    throw;
  }
  impl_->leave(block, {y});
  impl_->end_forward(block);
  return y;
}

void FullyShard::present(const std::function<void()>& function, bool changed) {
  const std::lock_guard lock(impl_->mutex);
  impl_->fetch_all();
  const auto close = [&] {
    const at::NoGradGuard no_grad;
    for (const auto& b : impl_->blocks) {
      for (Flat& f : b->flats)
        if (changed)
          f.rank_part.copy_(f.memory.narrow(0, impl_->rank() * f.rank_part.numel(), f.rank_part.numel()));
      --b->uses.count;
      impl_->leave_idle(*b);
    }
    impl_->free.clear();
  };
  try {
    function();
  } catch (...) {
    close();
    throw;
  }
  close();
}

void FullyShard::restore() {
  const std::lock_guard lock(impl_->mutex);
  impl_->fetch_all();
  impl_->blocks.clear();
  impl_->free.clear();
}

std::vector<Tensor> FullyShard::parameters() const {
  const std::lock_guard lock(impl_->mutex);
  std::vector<Tensor> all;
  for (const auto& b : impl_->blocks) {
    for (const Flat& f : b->flats) {
      if (!f.is_trained) continue;
      for (const Piece& p : f.pieces) all.push_back(p.shard);
    }
  }
  return all;
}

Tensor FullyShard::shard(const Tensor& parameter) const {
  const std::lock_guard lock(impl_->mutex);
  for (const auto& b : impl_->blocks) {
    for (const Flat& f : b->flats) {
      for (const Piece& p : f.pieces)
        if (p.tensor.is_same(parameter) && f.is_trained) return p.shard;
    }
  }
  TORCH_CHECK_VALUE(false, kName,
                    ": parameter: expected a trained parameter of a block, received another tensor of ",
                    parameter.sizes());
}

std::shared_ptr<void> FullyShard::accumulate() {
  const auto add = [impl = impl_](int count) {
    const std::lock_guard lock(impl->mutex);
    impl->accumulating += count;
  };
  add(1);
  return {nullptr, [add](void*) { add(-1); }};
}

Tensor FullyShard::clip_grad_norm_(double max_norm) {
  const std::lock_guard lock(impl_->mutex);
  const at::NoGradGuard no_grad;
  std::vector<Tensor> grads;
  for (const Tensor& p : parameters())
    if (p.grad().defined() && p.numel() > 0) grads.push_back(p.grad());
  Tensor squares = at::zeros({}, at::kDouble);
  for (const Tensor& g : grads) squares += at::linalg_vector_norm(g, 2, {}, false, at::kFloat).square().cpu();
  std::vector<Tensor> sum{squares.to(device_of(*impl_->group))};
  wait_for(impl_->group, impl_->group->allreduce(sum), c10::str(kName, ": norm of the gradients"));
  const Tensor norm = sum[0].cpu().sqrt();
  const double factor = std::min(1.0, max_norm / (norm.item<double>() + 1e-6));
  if (factor < 1)
    for (Tensor& g : grads) g.mul_(factor);
  return norm;
}

std::map<std::string, int64_t> FullyShard::statistics() const {
  const std::lock_guard lock(impl_->mutex);
  int64_t parts = 0, gathered = 0;
  for (const auto& b : impl_->blocks) {
    for (const Flat& f : b->flats) {
      parts += static_cast<int64_t>(f.rank_part.nbytes());
      for (const Tensor& t : {f.memory, f.gradients})
        if (t.defined()) gathered += static_cast<int64_t>(t.nbytes());
    }
  }
  for (const Tensor& t : impl_->free) gathered += static_cast<int64_t>(t.nbytes());
  for (const auto& s : impl_->under_way)
    if (s.whole.defined()) gathered += static_cast<int64_t>(s.whole.nbytes());
  const auto& compressor = impl_->compressor;
  return {{"own", parts},
          {"gathered", gathered},
          {"received", impl_->received},
          {"sent", impl_->sent + (compressor ? compressor->sent_bytes() : 0)},
          {"residuals", compressor ? compressor->residual_bytes() : 0}};
}

}  // namespace shoestring::distributed
