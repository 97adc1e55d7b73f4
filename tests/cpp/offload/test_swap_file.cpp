// Tests the two classes that store offloaded optimizer state: SwapFile for a disk, and HostMemory, the
// allocator of host memory.

#include "catch.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <random>
#include <thread>

#include <ATen/ATen.h>

#include "child.h"
#include "folder.h"
#include "offload/disturbed.h"
#include "offload/host_memory.h"
#include "offload/swap_file.h"

using Catch::Contains;
using shoestring::offload::HostMemory;
using shoestring::offload::SwapFile;
using Backend = SwapFile::Backend;

namespace {

constexpr int64_t kSwapPage = SwapFile::kAlignment;
const c10::Device kHost(c10::kCPU);

at::Tensor random_bytes(HostMemory& memory, int64_t size, uint64_t seed) {
  at::Tensor bytes = memory.empty({size}, at::kByte);
  std::mt19937_64 random(seed);
  for (int64_t i = 0; i < size; i += 8) {
    const uint64_t x = random();
    std::memcpy(static_cast<char*>(bytes.data_ptr()) + i, &x, sizeof x);
  }
  return bytes;
}

// Writes and reads random extents of a swap file, with many transfers in flight, and compares the data with a
// copy in memory.
void shadow(SwapFile& file, uint64_t seed) {
  constexpr int64_t kPages = 64;
  HostMemory memory("test", kHost);
  std::mt19937_64 random(seed);
  const int64_t base = file.allocate(kPages * kSwapPage);
  const at::Tensor expected = memory.empty({kPages * kSwapPage}, at::kByte).zero_();
  const at::Tensor zeros = memory.empty({kPages * kSwapPage}, at::kByte).zero_();
  file.wait(file.write(base, zeros.data_ptr(), zeros.numel()));
  for (int round = 0; round < 6; ++round) {
    // Writes in flight to parts of the file that do not overlap, and the tensors that they write.
    std::vector<std::pair<SwapFile::Ticket, at::Tensor>> writes;
    for (int64_t page = 0; page < kPages;) {
      const auto pages = std::min<int64_t>(kPages - page, 1 + random() % 9);
      if (random() % 3 > 0) {
        const at::Tensor bytes = random_bytes(memory, pages * kSwapPage, random());
        expected.narrow(0, page * kSwapPage, pages * kSwapPage).copy_(bytes);
        writes.emplace_back(file.write(base + page * kSwapPage, bytes.data_ptr(), pages * kSwapPage), bytes);
      }
      page += pages;
    }
    for (auto i = writes.rbegin(); i != writes.rend(); ++i) file.wait(i->first);
    struct Read {
      SwapFile::Ticket ticket;
      int64_t page, pages;
      at::Tensor bytes;
    };
    std::vector<Read> reads;
    for (int i = 0; i < 80; ++i) {  // more reads than io_uring's ring holds at a time
      const auto page = static_cast<int64_t>(random() % kPages);
      const auto pages = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(kPages - page));
      at::Tensor bytes = memory.empty({pages * kSwapPage}, at::kByte);
      reads.push_back(
          {file.read(base + page * kSwapPage, bytes.data_ptr(), pages * kSwapPage), page, pages, bytes});
    }
    for (const Read& r : reads) {
      file.wait(r.ticket);
      REQUIRE(at::equal(r.bytes, expected.narrow(0, r.page * kSwapPage, r.pages * kSwapPage)));
    }
  }
  file.free(base, kPages * kSwapPage);
}

}  // namespace

TEST_CASE("a swap file is memory, with either back end, and whatever transfers do", "[offload]") {
  const Folder folder;
  for (const Backend backend : {Backend::kBest, Backend::kThreads}) {
    SwapFile file("test", folder.path, backend);
    CAPTURE(file.uses_io_uring(), file.is_direct());
    if (backend == Backend::kThreads) CHECK_FALSE(file.uses_io_uring());
    CHECK(folder.files().empty());  // the swap file has no name, so a killed process leaves nothing behind
    const auto seed = std::random_device()();
    CAPTURE(seed);
    shadow(file, seed);
    {
      const Disturbed slow({.max_delay_us = 300});
      shadow(file, seed + 1);
    }
    const Disturbed halves({.max_delay_us = 50, .short_transfers = true});
    shadow(file, seed + 2);
  }
}

// The kernel of the CI machines allows io_uring. Without this test, a bug could silently make every machine
// use the slower fallback, a thread pool.
TEST_CASE("io_uring is used where the kernel allows it", "[offload]") {
  const Folder folder;
  char allowed = '2';
  if (const int fd = ::open("/proc/sys/kernel/io_uring_disabled", O_RDONLY); fd >= 0) {
    CHECK(::read(fd, &allowed, 1) == 1);
    ::close(fd);
  }
  if (allowed != '0') return;
  CHECK(SwapFile("test", folder.path).uses_io_uring());
}

TEST_CASE("several threads share a swap file", "[offload]") {
  const Folder folder;
  for (const Backend backend : {Backend::kBest, Backend::kThreads}) {
    SwapFile file("test", folder.path, backend);
    std::vector<std::thread> threads;
    std::atomic<int> bad{0};
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        HostMemory memory("test", kHost);
        for (int i = 0; i < 30; ++i) {
          const at::Tensor out =
              random_bytes(memory, (1 + i % 4) * kSwapPage, static_cast<uint64_t>(100 * t + i));
          const at::Tensor in = memory.empty({out.numel()}, at::kByte);
          const int64_t at = file.allocate(out.numel());
          file.wait(file.write(at, out.data_ptr(), out.numel()));
          file.wait(file.read(at, in.data_ptr(), in.numel()));
          bad += !at::equal(in, out);
          file.free(at, out.numel());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(bad == 0);
    // freed extents are reused; without reuse the file would have about 300 pages
    CHECK(file.size() <= 32 * kSwapPage);
  }
}

TEST_CASE("a transfer that fails is an error that names file and extent, and can be repeated", "[offload]") {
  const Folder folder;
  HostMemory memory("test", kHost);
  for (const Backend backend : {Backend::kBest, Backend::kThreads}) {
    SwapFile file("AdamW: offload", folder.path, backend);
    const int64_t size = 4 * kSwapPage, at = file.allocate(size);
    const at::Tensor out = random_bytes(memory, size, 1), in = memory.empty({size}, at::kByte);
    const auto failing = [&](int error, auto&& transfer, const std::string& expected) {
      const Disturbed bad({.fail_after = 0, .error = error});
      const auto ticket = transfer();
      CHECK_THROWS_WITH(file.wait(ticket), Contains("AdamW: offload: " + folder.path) && Contains(expected));
      CHECK_NOTHROW(file.wait(transfer()));
      CHECK_THROWS_WITH(file.wait(ticket), Contains("expected one not waited for yet"));
    };
    const auto write = [&] { return file.write(at, out.data_ptr(), size); };
    const auto read = [&] { return file.read(at, in.data_ptr(), size); };
    failing(EIO, write, "cannot write 16384 bytes at 0: Input/output error");
    failing(ENOSPC, write, "No space left on device; free some space or choose another folder");
    failing(EIO, read, "cannot read 16384 bytes at 0: Input/output error");
    CHECK(at::equal(in, out));
    failing(0, read, "the file ends after 0 of them");
    REQUIRE(::ftruncate(file.descriptor(), 2 * kSwapPage) == 0);
    CHECK_THROWS_WITH(file.wait(read()),
                      Contains("cannot read 16384 bytes at 0: the file ends after 8192 of them"));
  }
}

TEST_CASE("what cannot be is refused before anything happens", "[offload]") {
  const Folder folder;
  CHECK_THROWS_WITH(SwapFile("test", folder / "none"),
                    Contains("none/shoestring-swap-") && Contains("No such file"));
  SwapFile file("test", folder.path);
  CHECK_THROWS_WITH(
      file.allocate(int64_t{1} << 60),
      Contains("expected room for 1152921504606846976 bytes on the disk, received ") && Contains(" free"));
  CHECK(file.size() == 0);
  CHECK_THROWS_WITH(file.allocate(100), Contains("size: expected a multiple of 4096 bytes, received 100"));
  CHECK(file.allocate(kSwapPage) == 0);
  HostMemory memory("test", kHost);
  const at::Tensor page = memory.empty({2 * kSwapPage}, at::kByte);
  CHECK_THROWS_WITH(file.read(0, static_cast<char*>(page.data_ptr()) + 512, kSwapPage),
                    Contains("expected memory, offset and size in multiples of 4096 bytes"));
  CHECK_THROWS_WITH(file.write(0, page.data_ptr(), 2 * kSwapPage),
                    Contains("expected an extent within 4096 bytes"));
}

TEST_CASE("a disk that is full is said before anything is written, and grows with it", "[offload]") {
  const Folder folder;
  if (::mount("shoestring", folder.path.c_str(), "tmpfs", 0, "size=1m") != 0) {
    WARN("not checked: this user may not mount a file system of 1 MiB");
    return;
  }
  {
    HostMemory memory("test", kHost);
    SwapFile file("test", folder.path);
    const int64_t at = file.allocate(1 << 19);
    CHECK_THROWS_WITH(file.allocate(1 << 20),
                      Contains("expected room for 1048576 bytes on the disk, received 524288 free"));
    file.free(at, 1 << 19);
    // the free extent at the end of the file is reused, and the file grows behind it
    CHECK(file.allocate(1 << 20) == 0);
    CHECK(file.size() == 1 << 20);
    const at::Tensor a = random_bytes(memory, 1 << 20, 5), b = memory.empty({1 << 20}, at::kByte);
    file.wait(file.write(0, a.data_ptr(), a.numel()));
    file.wait(file.read(0, b.data_ptr(), b.numel()));
    CHECK(at::equal(a, b));
  }
  ::umount(folder.path.c_str());
}

TEST_CASE("space is reserved before it is allocated, also where the file system cannot", "[offload]") {
  const Folder folder;
  if (::mount("shoestring", folder.path.c_str(), "tmpfs", 0, "size=1m") != 0) {
    WARN("not checked: this user may not mount a file system of 1 MiB");
    return;
  }
  for (const bool reserves : {true, false}) {
    CAPTURE(reserves);
    const Disturbed disturbed({.reserves = reserves});
    SwapFile file("test", folder.path), other("test", folder.path);
    file.reserve(3 << 18);
    CHECK(file.size() == 3 << 18);
    CHECK_THROWS_WITH(other.reserve(1 << 19), Contains("test: " + folder.path +
                                                       ": expected room for 524288 bytes on the "
                                                       "disk, received 262144 free: free some space"));
    CHECK(other.size() == 0);
    CHECK(file.allocate(1 << 19) == 0);
    CHECK(file.allocate(1 << 18) == 1 << 19);
    CHECK(file.size() == 3 << 18);
    other.reserve(1 << 18);
    struct stat info{};
    REQUIRE(::fstat(other.descriptor(), &info) == 0);
    // all blocks of the file are allocated on the disk: the file is not sparse
    CHECK(info.st_blocks * 512 == 1 << 18);
  }
  ::umount(folder.path.c_str());
}

TEST_CASE("a limit of the size of files is said", "[offload]") {
  const Folder folder;
  const int status = in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 20, 1 << 20};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
    SwapFile file("test", folder.path);
    file.reserve(1 << 20);
    try {
      file.reserve(1 << 20);
      return 3;
    } catch (const c10::Error& error) {
      const std::string expected =
          "expected room for a file of 2097152 bytes, received a lower limit of the size of a file";
      return std::string(error.what()).find(expected) == std::string::npos ? 4 : 0;
    }
  });
  CHECK(status == 0);
}

TEST_CASE("a forked child drops a swap file, and cannot use it", "[offload]") {
  const Folder folder;
  HostMemory memory("test", kHost);
  for (const Backend backend : {Backend::kBest, Backend::kThreads}) {
    auto file = std::make_unique<SwapFile>("test", folder.path, backend);
    CAPTURE(file->uses_io_uring());
    const int64_t size = 16 * kSwapPage, at = file->allocate(size);
    const at::Tensor out = random_bytes(memory, size, 1), in = memory.empty({size}, at::kByte);
    const Disturbed slow({.max_delay_us = 3000});
    for (int i = 0; i < 8; ++i) {
      const auto ticket = file->write(at, out.data_ptr(), size);
      const int status = in_child([&] {  // the process forks while the write is in progress
        int refused = 0;
        const auto refuses = [&](auto&& use) {
          try {
            use();
          } catch (const c10::Error& error) {
            refused += std::string(error.what()).find("received its forked child") != std::string::npos;
          }
        };
        refuses([&] { file->allocate(kSwapPage); });
        refuses([&] { file->reserve(kSwapPage); });
        refuses([&] { file->read(at, in.data_ptr(), size); });
        refuses([&] { file->wait(ticket); });
        refuses([&] { memory.empty({3}, at::kByte); });
        file->free(at, size);
        file.reset();
        return refused == 5 ? 0 : 2;
      });
      CHECK(status == 0);
      file->wait(ticket);
      file->wait(file->read(at, in.data_ptr(), size));
      CHECK(at::equal(in, out));
    }
  }
}

TEST_CASE("host memory is exact, and used again", "[offload]") {
  HostMemory memory("test", kHost);
  const int64_t odd = 3 * kSwapPage - 5;
  at::Tensor a = memory.empty({odd}, at::kByte, 10 * kSwapPage);
  CHECK(memory.bytes() == 10 * kSwapPage);
  CHECK(a.sum().item<int64_t>() == 0);
  CHECK_FALSE(memory.is_pinned());
  // this tensor takes 7 pages, exactly the space that is left in the slab (memory block) of the allocator
  at::Tensor b = memory.empty({7, 1024}, at::kFloat);
  CHECK(memory.bytes() == 10 * kSwapPage);
  for (const at::Tensor& t : {a, b}) CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % kSwapPage == 0);
  b.fill_(1);
  const at::Tensor view = a.narrow(0, 5, 7);
  void* first = a.data_ptr();
  a = at::Tensor();
  // A view still holds the memory of the former tensor `a`, so a new tensor needs another slab.
  CHECK(memory.empty({kSwapPage}, at::kByte).data_ptr() != first);
  CHECK(memory.bytes() == 11 * kSwapPage);
  memory.trim();
  CHECK(memory.bytes() == 10 * kSwapPage);
  CHECK(memory.empty({0, 3}, at::kFloat).numel() == 0);

  // Tensors of random sizes that exist at the same time must not overlap. Freed memory must merge into one
  // free range.
  std::mt19937_64 random(7);
  std::vector<at::Tensor> alive;
  HostMemory pool("test", kHost);
  alive.push_back(pool.empty({400 * kSwapPage}, at::kByte));
  alive.clear();
  for (int i = 0; i < 300; ++i) {
    const auto size = 1 + static_cast<int64_t>(random() % (20 * kSwapPage));
    alive.push_back(pool.empty({size}, at::kByte).fill_(i % 251));
    if (alive.size() > 12) alive.erase(alive.begin() + static_cast<int64_t>(random() % alive.size()));
    for (const at::Tensor& t : alive) {
      const auto* bytes = t.const_data_ptr<uint8_t>();
      REQUIRE(std::all_of(bytes, bytes + t.numel(), [&](uint8_t x) { return x == bytes[0]; }));
    }
  }
  CHECK(pool.bytes() == 400 * kSwapPage);
  alive.clear();
  alive.push_back(pool.empty({400 * kSwapPage}, at::kByte));
  CHECK(pool.bytes() == 400 * kSwapPage);
  at::Tensor orphan;
  {
    HostMemory gone("test", kHost);
    orphan = gone.empty({100}, at::kByte).fill_(3);
  }
  CHECK(orphan.sum().item<int64_t>() == 300);
}
