#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

/// The flat token file of `shoestring tokenize`: a header of 64 bytes, little-endian, then the tokens.
/// Header: magic "shoetok\1", uint32 vocabulary, uint32 bytes per token (2 or 4), uint64 tokens, 40 zero
/// bytes. Read, not mapped: mapped pages would count as the process's memory.
class TokenFile {
 public:
  explicit TokenFile(const std::string& path);
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  int64_t size() const { return size_; }
  int64_t vocab_size() const { return vocab_size_; }
  /// Tokens [begin, begin + length) of each row, as int64 (rows, length).
  at::Tensor read(const std::vector<int64_t>& begins, int64_t length) const;
  /// Tells files apart: size, vocabulary, and a hash of the first and the last tokens.
  std::string fingerprint() const;

 private:
  void read_bytes(void* out, int64_t bytes, int64_t offset) const;

  std::string path_;
  int fd_ = -1;
  int64_t vocab_size_ = 0, width_ = 0, size_ = 0;
};

/// Consecutive blocks of seq_len tokens, each read with the token that follows it; the tail is held out.
struct Blocks {
  const TokenFile& file;
  int64_t seq_len, begin, count;  // blocks [begin, begin + count)

  /// (rows, seq_len + 1)
  at::Tensor rows(const std::vector<int64_t>& numbers) const;
};

struct Split {
  Blocks train, validation;
};
Split split(const TokenFile& file, int64_t seq_len);

/// The blocks of each micro-batch: a pure function of the seed and the number of the micro-batch, so that a
/// resumed run needs no state. Every pass over the data is a new permutation.
class BatchOrder {
 public:
  BatchOrder(int64_t blocks, int64_t batch_size, int64_t seed);
  std::vector<int64_t> batch(int64_t number);

 private:
  int64_t blocks_, batch_size_, seed_, pass_ = -1;
  std::vector<int64_t> permutation_;
};
