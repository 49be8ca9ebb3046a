#pragma once
// Bytes of one frame. Every field starts on an 8-byte boundary; scalars take 8 bytes, structs their size
// rounded up. Host byte order: client and worker are both x86-64 (the handshake compares the rows hash).

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

namespace gpupool::schema {

constexpr size_t padded(size_t bytes) { return (bytes + 7) & ~size_t{7}; }

// Writes into memory the caller sized beforehand (see Measure in rows.h). Padding bytes are zero: what
// crosses the wire and what is hashed never depends on old memory.
class Writer {
 public:
  Writer(std::byte* begin, size_t capacity) : at_(begin), begin_(begin), end_(begin + capacity) {}

  template <class T>
  void value(const T& v) {
    static_assert(std::is_trivially_copyable_v<T>);
    raw(&v, sizeof v);
  }
  // Exactly `bytes` bytes, without a length.
  void raw(const void* data, size_t bytes) {
    size_t whole = padded(bytes);
    if (whole > static_cast<size_t>(end_ - at_)) {
      overflow_ = true;
      return;
    }
    if (whole != bytes) std::memset(at_ + whole - 8, 0, 8);
    if (bytes != 0) std::memcpy(at_, data, bytes);
    at_ += whole;
  }
  // Length, then the bytes.
  void blob(const void* data, size_t bytes) {
    value<uint64_t>(bytes);
    raw(data, bytes);
  }
  void text(std::string_view s) { blob(s.data(), s.size()); }
  // Room for `bytes` bytes to be filled in place; null on overflow.
  std::byte* space(size_t bytes) {
    size_t whole = padded(bytes);
    if (whole > static_cast<size_t>(end_ - at_)) {
      overflow_ = true;
      return nullptr;
    }
    std::byte* here = at_;
    if (whole != bytes) std::memset(at_ + whole - 8, 0, 8);
    at_ += whole;
    return here;
  }
  size_t size() const { return at_ - begin_; }
  bool overflow() const { return overflow_; }

 private:
  std::byte* at_;
  std::byte* begin_;
  std::byte* end_;
  bool overflow_ = false;
};

// Reads untrusted bytes. After a bad read everything yields zero and `bad()` stays true: check once, before
// the driver is called.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : at_(bytes.data()), end_(bytes.data() + bytes.size()) {}

  template <class T>
  T value() {
    static_assert(std::is_trivially_copyable_v<T>);
    T v{};
    if (const std::byte* p = take(sizeof v)) std::memcpy(&v, p, sizeof v);
    return v;
  }
  std::span<const std::byte> raw(size_t bytes) {
    const std::byte* p = take(bytes);
    return p ? std::span<const std::byte>(p, bytes) : std::span<const std::byte>();
  }
  std::span<const std::byte> blob() {
    uint64_t bytes = value<uint64_t>();
    if (bytes > static_cast<uint64_t>(end_ - at_)) {
      bad_ = true;
      return {};
    }
    return raw(bytes);
  }
  std::string_view text() {
    auto b = blob();
    return {reinterpret_cast<const char*>(b.data()), b.size()};
  }
  size_t remaining() const { return end_ - at_; }
  bool bad() const { return bad_; }
  void fail() { bad_ = true; }

 private:
  const std::byte* take(size_t bytes) {
    size_t whole = padded(bytes);
    if (bad_ || whole < bytes || whole > static_cast<size_t>(end_ - at_)) {
      bad_ = true;
      return nullptr;
    }
    const std::byte* p = at_;
    at_ += whole;
    return p;
  }
  const std::byte* at_;
  const std::byte* end_;
  bool bad_ = false;
};

// A buffer that grows, for replies whose size is not known beforehand.
class ByteBuffer {
 public:
  template <class T>
  void value(const T& v) {
    raw(&v, sizeof v);
  }
  void raw(const void* data, size_t bytes) {
    size_t at = bytes_.size();
    bytes_.resize(at + padded(bytes));
    if (bytes != 0) std::memcpy(bytes_.data() + at, data, bytes);
  }
  void blob(const void* data, size_t bytes) {
    value<uint64_t>(bytes);
    raw(data, bytes);
  }
  void text(std::string_view s) { blob(s.data(), s.size()); }
  std::span<const std::byte> span() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  void clear() { bytes_.clear(); }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace gpupool::schema
