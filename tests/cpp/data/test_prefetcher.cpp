// Tests data::Prefetcher on the CPU and on an asynchronous device, whose streams are threads.

#include "catch.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <shoestring/data/data.h>

#include "child.h"
#include "data/queue_device.h"

using at::Tensor;
using Catch::Contains;
using namespace shoestring::data;

namespace {

std::vector<c10::Device> prefetch_devices() { return {c10::kCPU, queue_device::install()}; }

void sleep_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Returns tensors whose sizes vary with the number of the batch, some of them empty or not contiguous.
Batch varied(int64_t number) {
  // a generator of its own, because the source and the test run on different threads
  const at::Generator random = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(number));
  const auto randn = [&](at::IntArrayRef sizes) { return at::randn(sizes, random); };
  const int64_t n = 1 + number * 37 % 50;
  return {randn({n, 3}),
          at::arange(2 * n).view({2, n}).t(),
          at::empty({0, n}, at::kBFloat16),
          at::scalar_tensor(number, at::kDouble),
          randn({1, 5}).expand({n, 5}),
          randn({n, 4}).slice(1, 0, 4, 2),
          randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
          at::conj(at::view_as_complex(randn({n, 2}))),
          at::full({3}, n % 2 == 0, at::kBool)};
}

Batch numbered(int64_t number) { return {at::full({1000}, number, at::kLong), at::full({7}, 0.5 + number)}; }

void check_equal(const Batch& ours, const Batch& expected, c10::Device device) {
  REQUIRE(ours.size() == expected.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    CAPTURE(i);
    CHECK(ours[i].device() == device);
    CHECK(ours[i].dtype() == expected[i].dtype());
    CHECK(at::equal(ours[i].cpu(), expected[i]));
    if (expected[i].is_non_overlapping_and_dense()) CHECK(ours[i].strides() == expected[i].strides());
  }
}

struct SlowLink {
  explicit SlowLink(double seconds) { queue_device::set_copy_seconds(seconds); }
  ~SlowLink() { queue_device::set_copy_seconds(0); }
};

struct OwnError {
  int64_t number;
};

}  // namespace

TEST_CASE("prefetched batches are those of the source", "[data]") {
  for (const c10::Device device : prefetch_devices()) {
    for (const int64_t depth : {1, 2, 3, 7}) {
      CAPTURE(device, depth);
      Prefetcher batches(varied, PrefetcherOptions(device).depth(depth).start(2).stop(23));
      for (int64_t number = 2; number < 23; ++number) {
        CAPTURE(number);
        CHECK(batches.position() == number);
        const auto batch = batches.next();
        REQUIRE(batch.has_value());
        check_equal(*batch, varied(number), device);
      }
      for (int repeat = 0; repeat < 2; ++repeat) {
        CHECK(!batches.next().has_value());
        CHECK(batches.position() == 23);
      }
    }
  }
}

TEST_CASE("a batch may be empty, and a source may end before the options do", "[data]") {
  for (const c10::Device device : prefetch_devices()) {
    CAPTURE(device);
    Prefetcher none(numbered, PrefetcherOptions(device).start(3).stop(3));
    CHECK(!none.next().has_value());
    Prefetcher ending(
        [](int64_t number) -> std::optional<Batch> {
          return number < 3 ? std::optional<Batch>(Batch()) : std::nullopt;
        },
        PrefetcherOptions(device).stop(10));
    for (int i = 0; i < 3; ++i) CHECK(ending.next()->empty());
    CHECK(!ending.next().has_value());
    CHECK(ending.position() == 3);
    // the largest batch has no bytes
    Prefetcher hollow([](int64_t) { return Batch{at::empty({0, 3})}; }, PrefetcherOptions(device).stop(2));
    CHECK(hollow.next()->at(0).sizes() == at::IntArrayRef({0, 3}));
  }
}

TEST_CASE("steps that the device has not done yet read their own batch", "[data]") {
  // Slow steps, slow copies, or neither. The host never waits for a step, so it runs ahead of the device.
  const c10::Device device = queue_device::install();
  for (const auto& [step, link] : {std::pair(0.004, 0.0), {0.0, 0.004}, {0.003, 0.003}, {0.0, 0.0}}) {
    for (const int64_t depth : {1, 2, 3}) {
      for (const bool poison : {false, true}) {
        CAPTURE(step, link, depth, poison);
        const SlowLink slow(link);
        std::vector<Tensor> results;
        {
          Prefetcher batches(numbered, PrefetcherOptions(device).depth(depth).stop(12).poison(poison));
          while (const auto batch = batches.next()) {
            for (const Tensor& t : *batch) results.push_back(queue_device::compute(t, step / 2));
          }
        }
        REQUIRE(results.size() == 24);
        for (int64_t number = 0; number < 12; ++number) {
          CAPTURE(number);
          CHECK(at::equal(results[2 * number].cpu(), numbered(number)[0]));
          CHECK(at::equal(results[2 * number + 1].cpu(), numbered(number)[1]));
        }
      }
    }
  }
}

TEST_CASE("who reads a batch too late finds poison, and autograd raises", "[data]") {
  const c10::Device device = queue_device::install();
  for (const bool poison : {false, true}) {
    CAPTURE(poison);
    // Nothing follows the second batch, so nothing but poison overwrites the first.
    Prefetcher batches(numbered, PrefetcherOptions(device).stop(2).poison(poison));
    const Batch first = *batches.next();
    const auto version = first[0]._version();
    CHECK(first[0].cpu()[0].item<int64_t>() == 0);
    batches.next();
    CHECK(first[0]._version() > version);
    sleep_ms(50);
    CHECK(first[0].cpu()[999].item<int64_t>() == (poison ? -1 : 0));
    CHECK(first[1].cpu().isnan().all().item<bool>() == poison);
  }
  // Each tensor has a version of its own, so one may be changed where another was saved for backward.
  Prefetcher batches(numbered, PrefetcherOptions(device).stop(1));
  const Batch batch = *batches.next();
  const auto version = batch[1]._version();
  batch[0].fill_(3);
  CHECK(batch[1]._version() == version);
}

TEST_CASE("a batch outlives its prefetcher, and its memory outlives the work on it", "[data]") {
  const c10::Device device = queue_device::install();
  const int64_t before = queue_device::bytes_in_use();
  for (const bool keeps : {false, true}) {
    CAPTURE(keeps);
    Tensor result;
    std::optional<Batch> batch;
    {
      Prefetcher batches(numbered, PrefetcherOptions(device).start(4).stop(9));
      batch = batches.next();
      result = queue_device::compute(batch->at(0), 0.05);
      if (!keeps) batch.reset();
    }
    if (keeps) check_equal(*batch, numbered(4), device);
    batch.reset();
    CHECK(at::equal(result.cpu(), numbered(4)[0]));
  }
  CHECK(queue_device::bytes_in_use() == before);
}

TEST_CASE("a source may fill the pinned memory itself", "[data]") {
  for (const c10::Device device : prefetch_devices()) {
    CAPTURE(device);
    std::set<const void*> places;
    const auto whole_of = [](int64_t number) {
      return at::arange(number, number + 70 + number % 3).repeat({4, 1});
    };
    Prefetcher batches(
        [&](int64_t number, HostBuffers& buffers) {
          const Tensor scratch = buffers.empty({3}, at::kFloat).fill_(9);
          const Tensor whole = buffers.empty({4, 70 + number % 3}, at::kLong).copy_(whole_of(number));
          places.insert(whole.const_data_ptr());
          // views of the same memory, in another order, beside a tensor elsewhere and one that is conjugated
          return Batch{whole.slice(1, 1), at::full({5}, number), whole.slice(1, 0, -1), scratch,
                       at::conj(buffers.empty({2}, at::kComplexFloat).fill_(c10::complex<float>(1, 2)))};
        },
        PrefetcherOptions(device).depth(2).stop(20));
    for (int64_t number = 0; number < 20; ++number) {
      CAPTURE(number);
      const Batch batch = *batches.next();
      const Tensor whole = whole_of(number);
      CHECK(at::equal(batch[0].cpu(), whole.slice(1, 1)));
      CHECK(at::equal(batch[1].cpu(), at::full({5}, number)));
      CHECK(at::equal(batch[2].cpu(), whole.slice(1, 0, -1)));
      CHECK(at::equal(batch[3].cpu(), at::full({3}, 9.0f)));
      CHECK(at::equal(batch[4].cpu(), at::conj(at::full({2}, c10::complex<float>(1, 2), at::kComplexFloat))));
    }
    // Once the sizes are known, each of the two slots has one place.
    if (!device.is_cpu()) CHECK(places.size() <= 8);
  }
}

TEST_CASE("buffers are allocated for the largest batch, not in each step", "[data]") {
  const c10::Device device = queue_device::install();
  const int64_t before = queue_device::allocations();
  {
    Prefetcher batches([](int64_t number) { return Batch{at::full({100 + number % 10}, number)}; },
                       PrefetcherOptions(device).depth(2).stop(200));
    while (batches.next()) {
    }
  }
  CHECK(queue_device::allocations() - before <= 4);
  const int64_t growing = queue_device::allocations();
  {
    Prefetcher batches([](int64_t number) { return Batch{at::full({1 + number * 1000}, number)}; },
                       PrefetcherOptions(device).depth(2).stop(6));
    for (int64_t number = 0; number < 6; ++number)
      check_equal(*batches.next(), {at::full({1 + number * 1000}, number)}, device);
  }
  CHECK(queue_device::allocations() - growing == 6);
}

TEST_CASE("an exception of the source comes with its batch, and stays", "[data]") {
  for (const c10::Device device : prefetch_devices()) {
    for (const int64_t bad : {0, 1, 5}) {
      CAPTURE(device, bad);
      std::atomic<int64_t> calls{0};
      Prefetcher batches(
          [&](int64_t number) {
            ++calls;
            if (number == bad) throw OwnError{number};
            return numbered(number);
          },
          PrefetcherOptions(device).depth(3));
      for (int64_t number = 0; number < bad; ++number) {
        // leave the reader time to fail long before its batch is asked for
        sleep_ms(5);
        check_equal(*batches.next(), numbered(number), device);
      }
      for (int repeat = 0; repeat < 3; ++repeat) {
        CHECK_THROWS_AS(batches.next(), OwnError);
        CHECK(batches.position() == bad);
      }
      CHECK(calls == bad + 1);
    }
  }
}

TEST_CASE("a run resumes at every position", "[data]") {
  for (const c10::Device device : prefetch_devices()) {
    for (int64_t stopped = 0; stopped <= 6; ++stopped) {
      CAPTURE(device, stopped);
      int64_t position = 0;
      {
        Prefetcher batches(varied, PrefetcherOptions(device).stop(6));
        for (int64_t i = 0; i < stopped; ++i) batches.next();
        position = batches.position();
      }
      CHECK(position == stopped);
      Prefetcher resumed(varied, PrefetcherOptions(device).start(position).stop(6));
      for (int64_t number = stopped; number < 6; ++number)
        check_equal(*resumed.next(), varied(number), device);
      CHECK(!resumed.next().has_value());
    }
  }
}

TEST_CASE("a prefetcher may be destroyed at any moment", "[data]") {
  for (const c10::Device device : prefetch_devices()) {
    const SlowLink slow(0.002);
    for (int64_t taken = 0; taken < 12; ++taken) {
      CAPTURE(device, taken);
      std::atomic<bool> inside{false};
      {
        Prefetcher batches(
            [&](int64_t number) {
              inside = true;
              sleep_ms(number % 3 * 2);
              inside = false;
              return numbered(number);
            },
            PrefetcherOptions(device));
        for (int64_t i = 0; i < taken; ++i) batches.next();
        if (taken % 4 == 3) sleep_ms(1);
      }
      CHECK(!inside);
    }
  }
}

TEST_CASE("a second thread in next() is an error", "[data]") {
  for (const c10::Device device : prefetch_devices()) {
    CAPTURE(device);
    std::promise<void> free;
    Prefetcher batches(
        [freed = free.get_future().share()](int64_t number) {
          freed.wait();
          return numbered(number);
        },
        PrefetcherOptions(device).stop(2));
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<Batch> taken;
    std::vector<std::string> errors;
    const auto take = [&] {
      std::optional<Batch> batch;
      std::string error;
      try {
        batch = batches.next();
      } catch (const c10::Error& raised) {
        error = raised.what_without_backtrace();
      }
      const std::lock_guard lock(mutex);
      if (batch) taken.push_back(*batch);
      if (!error.empty()) errors.push_back(error);
      changed.notify_all();
    };
    // The source blocks, so one thread waits in next(), and the call of the other one ends first.
    std::thread one(take), two(take);
    {
      std::unique_lock lock(mutex);
      CHECK(changed.wait_for(lock, std::chrono::seconds(20), [&] { return !errors.empty(); }));
      CHECK(taken.empty());
    }
    free.set_value();
    one.join();
    two.join();
    REQUIRE(errors.size() == 1);
    CHECK_THAT(errors[0],
               Contains("Prefetcher: next: expected one thread at a time, got a call while another "
                        "thread waits for batch 0. Call next from one thread"));
    REQUIRE(taken.size() == 1);
    check_equal(taken[0], numbered(0), device);
    check_equal(*batches.next(), numbered(1), device);
    CHECK(!batches.next().has_value());
  }
}

TEST_CASE("two prefetchers at once", "[data]") {
  for (const c10::Device device : prefetch_devices()) {
    CAPTURE(device);
    Prefetcher one(varied, PrefetcherOptions(device).poison(true)),
        two(numbered, PrefetcherOptions(device).start(50).depth(3));
    std::vector<Tensor> results;
    for (int64_t i = 0; i < 12; ++i) {
      const Batch a = *one.next(), b = *two.next();
      check_equal(a, varied(i), device);
      check_equal(b, numbered(50 + i), device);
    }
  }
}

TEST_CASE("a forked child may drop a prefetcher, but not use it", "[data]") {
  // no computation before the fork needs threads of OpenMP
  auto batches = std::make_unique<Prefetcher>(
      [](int64_t number) {
        sleep_ms(3);
        return numbered(number);
      },
      PrefetcherOptions(c10::kCPU));
  batches->next();
  const int64_t position = batches->position();
  CHECK(in_child([&] {
          if (batches->position() != position) return 1;
          try {
            batches->next();
            return 2;
          } catch (const c10::Error& error) {
            if (std::string(error.what()).find("Prefetcher: expected process") == std::string::npos) return 3;
          }
          batches.reset();
          Prefetcher own(numbered, PrefetcherOptions(c10::kCPU).start(5));
          return at::equal(own.next()->at(0), numbered(5)[0]) ? 0 : 4;
        }) == 0);
  check_equal(*batches->next(), numbered(position), c10::kCPU);
}

TEST_CASE("the time in which the source is late is counted, and no other", "[data]") {
  const c10::Device device = queue_device::install();
  const auto waited = [&](int64_t source_ms, double step_seconds) {
    Prefetcher batches(
        [&](int64_t number) {
          sleep_ms(source_ms);
          return numbered(number);
        },
        PrefetcherOptions(device).stop(10));
    std::vector<Tensor> results;
    while (const auto batch = batches.next())
      results.push_back(queue_device::compute(batch->at(0), step_seconds));
    queue_device::synchronize();
    return batches.seconds_waited();
  };
  CHECK(waited(20, 0) >= 0.19);
  // A slow device holds the host back for at least 0.2 s.
  CHECK(waited(0, 0.04) < 0.1);
}

TEST_CASE("wrong options and tensors are named", "[data]") {
  const auto make = [](const PrefetcherOptions& options) { Prefetcher batches(numbered, options); };
  CHECK_THROWS_WITH(
      make(PrefetcherOptions(c10::kCPU).depth(0)),
      Contains("Prefetcher: depth: expected at least 1, got 0. Use 2 to read one batch ahead."));
  CHECK_THROWS_WITH(make(PrefetcherOptions(c10::kCPU).start(-1)),
                    Contains("Prefetcher: start: expected at least 0, got -1"));
  CHECK_THROWS_WITH(make(PrefetcherOptions(c10::kCPU).start(5).stop(4)),
                    Contains("Prefetcher: stop: expected at least start, which is 5, got 4"));
  for (const c10::Device device : {c10::Device("meta"), c10::Device("xla:0")}) {
    CHECK_THROWS_WITH(
        make(PrefetcherOptions(device)),
        Contains("Prefetcher: device: expected the CPU or an accelerator of this PyTorch, got"));
  }
  queue_device::install();
  CHECK_THROWS_WITH(make(PrefetcherOptions(c10::Device(c10::kPrivateUse1, 3))),
                    Contains("Prefetcher: device: expected one of the devices of this machine, got") &&
                        Contains(":3 where PyTorch finds 1 of this type"));
  for (const c10::Device device : prefetch_devices()) {
    for (const Tensor& wrong : {Tensor(), at::eye(3).to_sparse(), at::empty({2}, c10::Device("meta"))}) {
      CAPTURE(device);
      Prefetcher batches(
          [&](int64_t number) { return number == 1 ? Batch{at::ones({2}), wrong} : numbered(number); },
          PrefetcherOptions(device));
      batches.next();
      CHECK_THROWS_WITH(batches.next(),
                        Contains("Prefetcher: source: expected dense tensors on the CPU, got") &&
                            Contains("as tensor 1 of batch 1. Return"));
    }
  }
}
