#pragma once
// The stream between the worker that a session leaves and the one that rebuilds it: blocks of bytes with
// their length, and descriptors. Whoever is at the other end is taken for hostile: no length is believed
// beyond what the caller allows, and every wait ends with `stopping`, with the peer, or after kSilence
// without a byte.
//
// One thread at a time. Every function: false, and `error` says why; the stream is of no use from then on.

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "server/images/image_cache.h"  // Descriptor

namespace gpupool::server {

class StateSocket {
 public:
  static constexpr int kSilenceSeconds = 300;

  // socket: SOCK_STREAM, which this takes.
  StateSocket(Descriptor socket, std::function<bool()> stopping);

  bool send(std::span<const std::byte> bytes);       // exactly these
  bool receive(std::span<std::byte> bytes);          // exactly as many
  bool sendBlock(std::span<const std::byte> bytes);  // behind their number
  bool receiveBlock(std::vector<std::byte>& bytes, uint64_t most);
  bool sendDescriptors(std::span<const int> descriptors);
  // Exactly `count`, close-on-exec.
  bool receiveDescriptors(std::vector<Descriptor>& descriptors, size_t count);

  const std::string& error() const { return error_; }
  // What the peer sent before it went may still be read.
  void forgetError() { error_.clear(); }

 private:
  bool await(short events);
  bool fail(std::string why);

  Descriptor socket_;
  std::function<bool()> stopping_;
  std::string error_;
};

}  // namespace gpupool::server
