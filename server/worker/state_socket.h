#pragma once
// The stream between the worker that a session leaves and the one that rebuilds it: blocks of bytes with
// their length, contents whose length both know, and, on one machine, descriptors. Whoever is at the other
// end is taken for hostile: no length is believed beyond what the caller allows, and every wait ends with
// `stopping`, with the peer, or after kSilence without a byte. Over TCP a machine that is gone without a word
// counts as an end of the peer after kUnreachable.
//
// One thread at a time. Every function: false, and `error` says why; the stream is of no use from then on.

#include <chrono>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "server/images/image_cache.h"  // Descriptor
#include "server/worker/checksum.h"

namespace gpupool::server {

class StateSocket {
 public:
  static constexpr int kSilenceSeconds = 300;
  static constexpr int kUnreachableSeconds = 30;
  static constexpr size_t kPartBytes = size_t{16} << 20;
  static constexpr uint64_t kMostAnswerBytes = 4096;

  // socket: SOCK_STREAM, which this takes.
  StateSocket(Descriptor socket, std::function<bool()> stopping);

  bool send(std::span<const std::byte> bytes);       // exactly these
  bool receive(std::span<std::byte> bytes);          // exactly as many
  bool sendBlock(std::span<const std::byte> bytes);  // behind their number
  bool receiveBlock(std::vector<std::byte>& bytes, uint64_t most);
  // Contents travel in parts of kPartBytes, the last one perhaps shorter: its length, the bytes, their
  // checksum. A part of another length than is expected is refused before a byte of it is taken. Between
  // parts a sender fails if the peer, whose turn it is not, has said something.
  bool sendPart(std::span<const std::byte> bytes, const Checksum& checksum);
  bool receivePart(std::span<std::byte> bytes, Checksum& checksum);  // not compared
  bool sendContent(std::span<const std::byte> bytes);
  bool receiveContent(std::span<std::byte> bytes);  // compared
  bool sendDescriptors(std::span<const int> descriptors);
  // How one end tells the other what it makes of what came: one block, empty where all is well, else why not,
  // for people. What is heard where nothing is: the error.
  bool answer(const std::string& why);
  std::string hearAnswer();
  // Exactly `count`, close-on-exec.
  bool receiveDescriptors(std::vector<Descriptor>& descriptors, size_t count);

  // Nothing follows: the peer, which waits for more, says what it has to say.
  void endSending();
  // Behind the last word to a peer that sends still: passes over what comes until it has ended, for `time` at
  // most. A connection that is closed with bytes unread may take with it what was said.
  void hearOut(std::chrono::milliseconds time);
  // True: the peer is gone, or sends nothing more. Does not wait.
  bool ended() const;

  const std::string& error() const { return error_; }
  // What the peer sent before it went may still be read, and it may be told why nothing more is.
  void forgetError() { error_.clear(); }

 private:
  bool goesOn();
  bool await(short events);
  bool readable() const;
  bool fail(std::string why);

  Descriptor socket_;
  std::function<bool()> stopping_;
  std::string error_;
};

inline constexpr char kOtherEnded[] = "the other worker has ended";
inline constexpr char kDamagedOnItsWay[] = "what the other worker sent was damaged on its way";

}  // namespace gpupool::server
