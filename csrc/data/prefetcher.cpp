#include <thread>
#include <utility>

#include <shoestring/data/data.h>

#include "data/prefetch_ring.h"

namespace shoestring::data {

at::Tensor HostBuffers::empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  return ring_.empty(sizes, dtype);
}

struct Prefetcher::Reader {
  Reader(FillingSource from, const PrefetcherOptions& options)
      : source(std::move(from)),
        ring(options.device(), options.depth(), options.start(), options.stop(), options.poison()),
        thread([this] { read(); }) {}
  ~Reader() {
    ring.close();
    thread.join();
  }

  void read() {
    try {
      HostBuffers buffers(ring);
      while (const auto number = ring.claim()) {
        auto batch = source(*number, buffers);
        if (!batch) return ring.finish();
        ring.put(std::move(*batch));
      }
    } catch (...) {
      ring.fail(std::current_exception());
    }
  }

  const FillingSource source;
  PrefetchRing ring;
  std::thread thread;
};

Prefetcher::Prefetcher(Source source, const PrefetcherOptions& options)
    : Prefetcher(FillingSource(
                     [source = std::move(source)](int64_t number, HostBuffers&) { return source(number); }),
                 options) {}

Prefetcher::Prefetcher(FillingSource source, const PrefetcherOptions& options)
    : reader_(new Reader(std::move(source), options), offload::DeleteInOwnProcess()) {}

Prefetcher::~Prefetcher() = default;

std::optional<Batch> Prefetcher::next() { return reader_->ring.next(); }

int64_t Prefetcher::position() const { return reader_->ring.position(); }

double Prefetcher::seconds_waited() const { return reader_->ring.seconds_waited(); }

}  // namespace shoestring::data
