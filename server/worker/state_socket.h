#pragma once
// The stream between the worker that a session leaves and the one that rebuilds it: blocks of bytes with
// their length, contents whose length both know, and, on one machine, descriptors. Whoever is at the other
// end is taken for hostile: no length is believed beyond what the caller allows, and every wait ends with
// `stopping`, with the peer, or after kSilence without a byte. Over TCP a machine that is gone without a word
// counts as an end of the peer after kUnreachable.
//
// On one machine the bytes of parts need not pass through the socket: the receiver of contents offers memory
// that both map with an answer (offerRoom), as a descriptor. A sender that takes it (hearOffer) lays parts
// out there, and sends of each its length, its place and its checksum; the receiver gives the place back when
// it needs it no more. A sender that knows nothing of this does not see the descriptor, and sends the bytes,
// as does one for which there is none. Whoever is at the other end can change what lies there at any time:
// what was checked there is not what is read there later.
//
// A part's checksum is made of its bytes, one after the other. A receiver of this build also takes one that
// is made of its pages' checksums: both ends can make those several at a time, and a sender that knows the
// pages' need not read the bytes again. That it does stands in the memory that it offers, at its beginning,
// until the first part lies there: older senders do not look, and of older receivers it is zero.
//
// One thread at a time. Every function: false, and `error` says why; the stream is of no use from then on.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/images/image_cache.h"  // Descriptor
#include "server/worker/checksum.h"
#include "server/worker/page_layout.h"
#include "server/worker/part_room.h"

namespace gpupool::server {

struct ReceivedPart {
  std::span<std::byte> bytes;
  Checksum checksum{};  // not compared
  bool shared = false;  // they lie in the memory that was offered
  bool paged = false;   // the checksum is that of their pages (checksumOfPages)
};

// Of bytes whose pages have these checksums: each kPageBytes long, but for the last one. Of one page, its
// own.
Checksum checksumOfPages(std::span<const Checksum> pages);

class StateSocket {
 public:
  static constexpr int kSilenceSeconds = 300;
  static constexpr int kUnreachableSeconds = 30;
  static constexpr size_t kPartBytes = size_t{16} << 20;
  static constexpr uint64_t kMostAnswerBytes = 4096;
  static constexpr size_t kMostRoomBytes = size_t{256} << 20;

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
  // The next one that lies in `room()`, whose pages have these checksums. Only where the receiver takes that.
  bool sendPages(std::span<const std::byte> bytes, std::span<const Checksum> pages);
  bool takesPages() const { return takesPages_; }
  // As long as `room`, where the bytes go unless they are shared.
  bool receivePart(std::span<std::byte> room, ReceivedPart& part);
  bool sendContent(std::span<const std::byte> bytes);
  bool receiveContent(std::span<std::byte> bytes);  // compared
  bool sendDescriptors(std::span<const int> descriptors);
  // How one end tells the other what it makes of what came: one block, empty where all is well, else why not,
  // for people. What is heard where nothing is: the error.
  bool answer(const std::string& why);
  std::string hearAnswer();

  // The receiver of contents. offerRoom: answer(""), and offers that memory, sealed as SharedMemory is; null:
  // none. giveBack: of each part, in their order, as soon as it is not needed any more.
  bool offerRoom(std::shared_ptr<transport::SharedMemory> memory);
  bool canOffer() const;  // both are on one machine
  bool giveBack(const ReceivedPart& part);
  const std::shared_ptr<transport::SharedMemory>& offered() const { return offered_; }
  // How many parts of that length it may hold without giving one back: a sender has room for as many more.
  size_t partsAtOnce(size_t bytes, size_t most) const;

  // The sender. hearOffer: hearAnswer, and takes what is offered. Without any, ownRoom says where parts lie
  // that are sent as bytes.
  std::string hearOffer();
  void ownRoom(std::shared_ptr<transport::SharedMemory> memory) {
    room_.emplace(std::move(memory));
    roomIsShared_ = takesPages_ = false;
  }
  PartRoom* room() { return room_ ? &*room_ : nullptr; }
  // Until a part was given back.
  bool awaitRoom();
  size_t sharedParts() const { return sharedParts_; }  // that were sent, or came

  // Exactly `count`, close-on-exec.
  bool receiveDescriptors(std::vector<Descriptor>& descriptors, size_t count);

  // Nothing follows: the peer, which waits for more, says what it has to say.
  void endSending();
  // Behind the last word to a peer that sends still: passes over what comes until it has ended, for `time` at
  // most. A connection that is closed with bytes unread may take with it what was said.
  void hearOut(std::chrono::milliseconds time);
  // True: the peer is gone, or sends nothing more. Does not wait.
  bool ended() const;

  // From now on every function also fails, as if the peer had ended, once *over is true: a wait ends with it.
  // Any thread may set it. Null: no more. It must live until then.
  void endWith(const std::atomic<bool>* over) { over_ = over; }
  // For its addresses, and to shut it down; it stays this object's.
  int descriptor() const { return socket_; }

  const std::string& error() const { return error_; }
  // Always false.
  bool fail(std::string why);
  // What the peer sent before it went may still be read, and it may be told why nothing more is.
  void forgetError() { error_.clear(); }

 private:
  bool goesOn();
  bool await(short events);
  bool readable() const;
  bool receiveLength(uint64_t& length, std::vector<Descriptor>* came = nullptr);
  bool receiveBytes(std::vector<std::byte>& bytes, uint64_t length, uint64_t most);
  bool takeRoom(Descriptor memory);
  bool isSilent();
  bool hearGivenBack(uint64_t word);
  bool sendPlaced(std::span<const std::byte> bytes, const Checksum& checksum, uint64_t marks);

  Descriptor socket_;
  std::function<bool()> stopping_;
  const std::atomic<bool>* over_ = nullptr;
  std::string error_;
  std::shared_ptr<transport::SharedMemory> offered_;  // by this end
  std::optional<PartRoom> room_;
  bool roomIsShared_ = false, takesPages_ = false;
  size_t sharedParts_ = 0;
};

inline constexpr char kOtherEnded[] = "the other worker has ended";
inline constexpr char kDamagedOnItsWay[] = "what the other worker sent was damaged on its way";

}  // namespace gpupool::server
