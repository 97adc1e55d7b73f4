#include "data.h"

// Reads token files, and splits them into blocks and batches.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randperm.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "input_error.h"

namespace {

constexpr int64_t kHeader = 64;

struct Header {
  char magic[8];
  uint32_t vocab_size, width;
  uint64_t size;
  char zero[40];
};
static_assert(sizeof(Header) == kHeader);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

}  // namespace

TokenFile::TokenFile(const std::string& path) : path_(path) {
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) throw InputError("--data " + path + ": cannot open: " + std::strerror(errno));
  struct stat info{};
  ::fstat(fd_, &info);
  Header header{};
  const bool readable = S_ISREG(info.st_mode) && ::pread(fd_, &header, kHeader, 0) == kHeader;
  if (!readable || std::memcmp(header.magic, "shoetok\1", 8) != 0) {
    throw InputError("--data " + path + ": not a token file; write one with `shoestring tokenize`");
  }
  const uint64_t bytes = info.st_size - kHeader;
  if (header.width != 2 && header.width != 4) {
    throw InputError("--data " + path + ": expected 2 or 4 bytes per token, received " +
                     std::to_string(header.width));
  }
  if (header.size == 0) throw InputError("--data " + path + ": the file holds no token");
  if (bytes % header.width != 0 || bytes / header.width != header.size) {
    throw InputError("--data " + path + ": the header says " + std::to_string(header.size) + " tokens of " +
                     std::to_string(header.width) + " bytes, but " + std::to_string(bytes) + " bytes follow");
  }
  if (header.vocab_size == 0)
    throw InputError("--data " + path + ": expected a vocabulary, received the size 0");
  vocab_size_ = header.vocab_size;
  width_ = header.width;
  size_ = static_cast<int64_t>(header.size);
}

TokenFile::~TokenFile() { ::close(fd_); }

void TokenFile::read_bytes(void* out, int64_t bytes, int64_t offset) const {
  for (char* to = static_cast<char*>(out); bytes > 0;) {
    const ssize_t n = ::pread(fd_, to, bytes, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      throw InputError("--data " + path_ + ": cannot read: " + (n < 0 ? std::strerror(errno) : "it was cut"));
    to += n, offset += n, bytes -= n;
  }
}

void TokenFile::read(const std::vector<int64_t>& begins, int64_t length, int64_t* out) const {
  for (int64_t begin : begins) {
    // The tokens of 2 or 4 bytes are read into the end of their row, and widened there from front to back.
    // The int64 element i ends at or before the byte where the narrow token i + 1 begins.
    char* const narrow = reinterpret_cast<char*>(out + length) - length * width_;
    read_bytes(narrow, length * width_, kHeader + begin * width_);
    for (int64_t i = 0; i < length; ++i) {
      uint32_t token = 0;
      std::memcpy(&token, narrow + i * width_, width_);
      if (token >= vocab_size_) {
        throw InputError("--data " + path_ + ": token " + std::to_string(token) + " at position " +
                         std::to_string(begin + i) + " is outside the vocabulary of " +
                         std::to_string(vocab_size_));
      }
      *out++ = token;
    }
  }
}

std::string TokenFile::fingerprint() const {
  constexpr int64_t kBlock = 1 << 17;  // words of 8 bytes
  std::vector<uint64_t> words(kBlock);
  uint64_t hash = 14695981039346656037u;  // initial hash value of FNV-1a, here of words
  for (int64_t done = 0, total = size_ * width_; done < total; done += 8 * kBlock) {
    const int64_t bytes = std::min<int64_t>(total - done, 8 * kBlock);
    words.assign((bytes + 7) / 8, 0);
    read_bytes(words.data(), bytes, kHeader + done);
    for (uint64_t word : words) hash = (hash ^ word) * 1099511628211u;
  }
  return std::to_string(size_) + " tokens, vocabulary " + std::to_string(vocab_size_) + ", hash " +
         std::to_string(hash);
}

at::Tensor Blocks::rows(const std::vector<int64_t>& numbers) const {
  at::Tensor rows = at::empty({static_cast<int64_t>(numbers.size()), seq_len + 1}, at::kLong);
  read(numbers, rows);
  return rows;
}

void Blocks::read(const std::vector<int64_t>& numbers, const at::Tensor& rows) const {
  std::vector<int64_t> begins;
  for (int64_t number : numbers) begins.push_back((begin + number) * seq_len);
  file.read(begins, seq_len + 1, rows.mutable_data_ptr<int64_t>());
}

Split split(const TokenFile& file, int64_t seq_len, double val_fraction) {
  const int64_t blocks = (file.size() - 1) / seq_len;
  const int64_t held_out =
      val_fraction > 0 ? std::max<int64_t>(1, static_cast<int64_t>(blocks * val_fraction)) : 0;
  if (blocks <= held_out) {
    throw InputError("--data: " + std::to_string(file.size()) + " tokens are too few for a training " +
                     (held_out > 0 ? "and a validation " : "") + "block of --seq-len " +
                     std::to_string(seq_len) + "; give more text or a smaller --seq-len");
  }
  return {{file, seq_len, 0, blocks - held_out}, {file, seq_len, blocks - held_out, held_out}};
}

BatchOrder::BatchOrder(int64_t blocks, int64_t batch_size, int64_t seed)
    : blocks_(blocks), batch_size_(batch_size), seed_(seed) {}

std::vector<int64_t> BatchOrder::batch(int64_t number) {
  std::vector<int64_t> drawn;
  for (int64_t position = number * batch_size_; position < (number + 1) * batch_size_; ++position) {
    if (position / blocks_ != pass_) {
      pass_ = position / blocks_;
      const uint64_t mixed = static_cast<uint64_t>(seed_) * 1'000'003 + static_cast<uint64_t>(pass_);
      const at::Tensor order = at::randperm(blocks_, at::detail::createCPUGenerator(mixed), at::kLong);
      permutation_.assign(order.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>() + blocks_);
    }
    drawn.push_back(permutation_[position % blocks_]);
  }
  return drawn;
}
