#include "offload/weight_core.h"

// The tables of a WeightStore: weights that operators read a few rows at a time.

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ceil_div.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "core/device.h"

namespace shoestring::offload {
namespace {

// Rows of a table that embedding() reads at a time.
constexpr int64_t kRowsAtATime = 512;

}  // namespace

void WeightStoreCore::add_table(const std::string& name, const at::Tensor& weight) {
  TORCH_CHECK(weight.device() == device && weight.has_storage(), kOffloadWeights, ": ", name,
              ": expected a weight with a storage on ", device, ", received one on ", weight.device());
  const auto size = static_cast<int64_t>(weight.storage().nbytes());
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.storage_offset() == 0 && size > 0 &&
                  size == static_cast<int64_t>(weight.nbytes()),
              kOffloadWeights, ": ", name,
              ": expected a contiguous weight (rows, columns) with a storage of its own, received ",
              weight.sizes(), " in a storage of ", size, " bytes");
  for (const auto& other_block : blocks) {
    TORCH_CHECK(!has_storage(*other_block, weight.storage()), kOffloadWeights, ": ", name,
                ": expected a weight of its own, received one that ", other_block->name, " has, too");
  }
  auto b = std::make_shared<WeightBlock>();
  b->name = name;
  b->pieces.push_back({weight.storage(), 0, size});
  b->watched.push_back(watch_weight(weight, /*is_trained=*/false));
  b->size = at::round_up(size, kPage);
  b->stacks = b->size;
  b->row = size / weight.size(0);
  b->sums = Checksums(size, b->row);
  take_away(*b);
  blocks.push_back(std::move(b));
}

// Returns the table of a weight, ready to be read. `mutex` is held.
WeightBlock& WeightStoreCore::table_of(const at::Tensor& weight) {
  process.check(kOffloadWeights);
  for (const auto& b : blocks) {
    if (b->row == 0 || !has_storage(*b, weight.storage())) continue;
    // Rows come from where the table is away, so changes must have arrived there.
    if (b->changed != 0 && b->uses.none()) evict(*b);
    if (b->leaving.defined()) settle();
    return *b;
  }
  TORCH_CHECK(false, kOffloadWeights, ": table: expected the weight of a table, received one of ",
              weight.sizes());
}

WeightStoreCore::Arrival WeightStoreCore::start_rows(WeightBlock& b, int64_t first, int64_t count) {
  const int64_t begin = first * b.row, end = begin + count * b.row;
  Arrival a;
  at::Tensor from = b.home;
  std::vector<FencePtr> after;
  if (file) {
    const int64_t page = begin / kPage * kPage;
    a.staging = host.empty({at::round_up(end, kPage) - page}, at::kByte);
    after.push_back(a.in =
                        reading.run({}, [this, &b, page, to = a.staging] { transfer(false, b, page, to); }));
    from = a.staging.narrow(0, begin - page, end - begin);
  } else {
    from = b.home.narrow(0, begin, end - begin);
  }
  fetched += end - begin;
  if (device.is_cpu()) {
    a.rows = from;
    return a;
  }
  a.rows = at::empty({end - begin}, at::TensorOptions().dtype(at::kByte).device(device));
  after.push_back(Fence::now(device));  // the memory may still be in use in the current stream
  a.in = in.run(std::move(after), [from, to = a.rows] { to.copy_(from, /*non_blocking=*/true); });
  return a;
}

void WeightStoreCore::for_each(const at::Tensor& weight, int64_t step, const Body& body) {
  const at::NoGradGuard no_grad;
  const c10::OptionalDeviceGuard guard(device);
  std::unique_lock lock(mutex);
  WeightBlock& b = table_of(weight);
  const int64_t rows = weight.size(0);
  const auto count_from = [&](int64_t first) {
    const int64_t rows_left = rows - first;
    return rows_left < step + kLeast ? rows_left : step;
  };
  Arrival now, next = start_rows(b, 0, count_from(0));
  try {
    for (int64_t first = 0; first < rows;) {
      now = std::exchange(next, {});
      const int64_t count = count_from(first), then = first + count;
      if (then < rows) next = start_rows(b, then, count_from(then));
      lock.unlock();
      now.in->block(current_stream(device));
      body(first, now.rows.view(weight.scalar_type()).view({count, weight.size(1)}));
      lock.lock();
      end_rows(now);
      first = then;
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    end_rows(now);
    end_rows(next);
    throw;
  }
}

// Lets memory of rows be reused as soon as no copy needs it.
void WeightStoreCore::end_rows(Arrival& a) {
  if (a.in == nullptr) return;
  try {
    a.in->block(current_stream(device));
  } catch (...) {  // the caller has had the error, or does not need these rows
  }
  if (a.staging.defined()) retired.emplace_back(std::move(a.staging), a.in);
  a = {};
  release_retired();
}

at::Tensor WeightStoreCore::embedding(const at::Tensor& weight, const at::Tensor& indices) {
  if (row_source_of(weight) == nullptr) return at::embedding(weight, indices);
  TORCH_CHECK(!weight.requires_grad() || !at::GradMode::is_enabled(), kOffloadWeights,
              ": table: expected a frozen weight, as when it left, received one of shape ", weight.sizes(),
              " that requires gradients now; bring the weights back first");
  const at::NoGradGuard no_grad;
  WeightBlock* b = nullptr;
  {
    const std::lock_guard lock(mutex);
    b = &table_of(weight);
  }
  const at::Tensor places = indices.to(c10::kCPU, at::kLong).contiguous();
  const auto* row_indices = places.const_data_ptr<int64_t>();
  const int64_t count = places.numel();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(row_indices[i] >= 0 && row_indices[i] < weight.size(0), kOffloadWeights, ": ", b->name,
                      ": expected indices in [0, ", weight.size(0), "), received ", row_indices[i]);
  }
  const at::Tensor out = at::empty({count * b->row}, at::kByte);
  auto* const to = out.mutable_data_ptr<uint8_t>();
  if (file) {
    read_rows(*b, row_indices, count, to);
  } else {
    const auto* from = b->home.const_data_ptr<uint8_t>();
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * b->row, from + row_indices[i] * b->row, b->row);
  }
  auto shape = indices.sizes().vec();
  shape.push_back(weight.size(1));
  return out.view(weight.scalar_type()).view(shape).to(device);
}

// Reads rows of a table from the file, many at a time, each with the pages around it.
void WeightStoreCore::read_rows(WeightBlock& b, const int64_t* row_indices, int64_t count, uint8_t* to) {
  const int64_t slot = at::round_up(b.row, kPage) + kPage;
  const at::Tensor pages = host.empty({std::min(count, kRowsAtATime) * slot}, at::kByte);
  auto* const memory = pages.mutable_data_ptr<uint8_t>();
  for (int64_t begin = 0; begin < count; begin += kRowsAtATime) {
    const int64_t some = std::min(kRowsAtATime, count - begin);
    std::vector<SwapFile::Ticket> tickets;
    for (int64_t i = 0; i < some; ++i) {
      const int64_t at = row_indices[begin + i] * b.row, page = at / kPage * kPage;
      tickets.push_back(file->read(b.at + page, memory + i * slot, at::round_up(at + b.row, kPage) - page));
    }
    std::exception_ptr error;
    for (int64_t i = 0; i < some; ++i) {
      const int64_t at = row_indices[begin + i] * b.row;
      const uint8_t* const row = memory + i * slot + at % kPage;
      try {
        file->wait(tickets[static_cast<size_t>(i)]);
        if (!error) check_sums(b, at, at + b.row, reinterpret_cast<const char*>(row) - at);
      } catch (...) {
        error = std::current_exception();
      }
      std::memcpy(to + (begin + i) * b.row, row, static_cast<size_t>(b.row));
    }
    if (error) std::rethrow_exception(error);
    const std::lock_guard lock(mutex);
    fetched += some * b.row;
  }
}

}  // namespace shoestring::offload
