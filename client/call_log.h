#pragma once
// What a protected session has sent since its last checkpoint, and what its program has seen of it: enough to
// send it again to the worker that restores the checkpoint (client/replay.h). The client keeps it, for it is
// the one who must survive.
//
// One order for all: frames and aside calls, puts with their bytes, and, where they became known here, words
// that were reached, replies that came, and host functions that began and ended. What a thread did because it
// had seen one of these stands behind that. Of what has been seen of contents a digest is kept.
//
// A cut is a moment in which a checkpoint may have been made: nothing was under way; frame 0 and aside call 0
// is the session's beginning. Entries begin with the first one; those before the cut of a checkpoint that the
// server keeps are dropped (`kept`). Beyond its limits, or where something cannot be made again, everything
// is dropped until the next cut, and what was sent between an earlier cut and that one cannot be made again.
//
// Threads: any, a mutex inside. What belongs together in order (a frame's entry and its being sent) is under
// the caller's lock of the channel.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/hmac.h"
#include "client/log_store.h"
#include "schema/frame.h"
#include "schema/session_calls.h"

namespace gpupool::client {

class CallLog {
 public:
  struct Limits {
    uint64_t frameBytes = 0, payloadBytes = 0;
  };
  enum class Place : uint8_t { staging, pinned };  // an offset there; an address
  enum Trait : uint8_t {
    kVaries = 1,  // of rows: Varies, Polls
    kPolls = 2,
    kContents = 4,  // its answer holds bytes of the device's memory, and no names or addresses
  };
  static constexpr size_t kCodePiece = size_t{256} << 10;  // bytes of code in a sessionImageData but the last
  // Code whose bytes are not sent, for the server has them: another one may not.
  struct Code {
    Digest digest{};
    uint64_t address = 0, bytes = 0;  // where the program has it
    std::vector<std::byte> copy;      // empty: it is there for as long as the program has it loaded
  };
  struct Entry {
    enum class Kind : uint8_t { frame, aside, put, get, word, reply, called, returned, printed };
    Kind kind{};
    Place place{};       // of a put, a get
    uint8_t traits = 0;  // of a frame, an aside call
    bool seen = false;   // of a frame that has the worker put bytes into pinned memory: they came
    // Of such a frame: nothing else was on its way to the same place, so that `digest` is of what came, and
    // replay compares that.
    bool compared = false;
    bool mixed = false;   // of such a frame: a host function may have changed what it brings
    uint32_t status = 0;  // of a reply; what a host function was told
    // Frame.seq of what was sent or answered; a word's index; where a put or get goes; of a host function
    // CallbackBody.id.
    uint64_t number = 0;
    uint64_t value = 0;          // a word's; bytes of a get; where a piece of code begins
    Digest digest{};             // of what was seen
    std::span<std::byte> bytes;  // the message; a put's payload; what kernels have printed
    const Code* code = nullptr;  // of a sessionImageData without bytes
  };

  explicit CallLog(Limits limits) : limits_(limits) {}

  // A message that is sent next. traits: of its call (Trait).
  void sent(bool aside, std::span<const std::byte> message, uint8_t traits);
  void put(Place place, uint64_t at, const void* from, size_t bytes);
  // While it is held, each sessionImageData without bytes that is sent for that image takes it along. stays:
  // it lies in a file that is mapped, and no copy is made. Null: nothing is recorded.
  std::shared_ptr<const Code> keepCode(const schema::ImageName& name, std::span<const std::byte> bytes,
                                       bool stays);
  void got(Place place, uint64_t at, std::span<const std::byte> bytes);
  // Before anybody here can see it.
  void reached(uint64_t word, uint64_t value);
  void answered(uint64_t seq, uint32_t status, std::span<const std::byte> outputs);
  static constexpr uint64_t kNoWord = UINT64_MAX;
  // What kernels have printed, before it is written.
  void printed(std::string_view text);
  // The worker has the program run a host function, before which the program waits for that word.
  void called(uint64_t function, uint32_t status, uint64_t word);
  // It has run; before the worker is told.
  void returned(uint64_t function);
  // What is sent from here on, until the next cut, cannot be made again.
  void refuse(const std::string& why);

  // Nothing is under way. Of several at one frame and aside call the first counts.
  void cut(uint64_t frame, uint64_t aside);
  // The server keeps a checkpoint of that cut.
  void kept(uint64_t frame, uint64_t aside);

  // Its size, whether a checkpoint is wanted, what keeps the calls since the last kept one from being made
  // again (empty: nothing), and whether there is one that is kept.
  struct State {
    uint64_t frameBytes = 0, payloadBytes = 0;
    bool wanted = false;
    std::string obstacle;
    bool kept = false;
  };
  State state() const;
  // True once, when a checkpoint has come to be wanted.
  bool turnsWanted() {
    return turned_.load(std::memory_order_relaxed) && turned_.exchange(false, std::memory_order_relaxed);
  }

  // ---- of the thread that sends it again, while nothing is sent
  // What was sent since that cut; none: why that cannot be made again.
  std::optional<std::vector<Entry*>> since(uint64_t frame, uint64_t aside, std::string& why);
  // How long ago that cut was.
  std::chrono::seconds age(uint64_t frame, uint64_t aside) const;
  // Of the last checkpoint that is known to be kept (State.kept).
  std::chrono::seconds keptAge() const;
  // The worker's staging memory lies elsewhere now: what names it is changed.
  void relocate(uint64_t from, uint64_t to, uint64_t bytes);

 private:
  using Clock = std::chrono::steady_clock;
  struct Size {
    uint64_t frameBytes = 0, payloadBytes = 0;
  };
  struct Cut {
    uint64_t frame = 0, aside = 0;
    uint64_t position = 0;
    Clock::time_point at;
    Size before;         // of all entries ever before it
    std::string broken;  // what came after it is not here, and why
  };
  struct Landing {  // bytes that the worker puts into pinned memory before the word is reached
    uint64_t position = 0, word = 0, value = 0, address = 0, bytes = 0;
  };
  // All under mutex_, but recorded().
  bool recording() const { return !cuts_.empty() && broken_.empty(); }
  // What is worth being prepared before the lock; recording() decides.
  bool recorded() const { return recorded_.load(std::memory_order_relaxed); }
  void add(const Entry& entry);
  void addSeen(const Entry& entry);
  Size size() const {
    return {ever_.frameBytes - dropped_.frameBytes, ever_.payloadBytes - dropped_.payloadBytes};
  }
  void breakOff(const std::string& why);
  void lookWanted();
  // Memory that is not needed any more: to be destroyed without the lock where it can be.
  std::vector<LogMemory::Piece> trim(uint64_t position, const Size& before);
  std::span<std::byte> copy(std::span<const std::byte> bytes);
  const Cut* find(uint64_t frame, uint64_t aside) const;
  static bool isPayload(const Entry& entry);
  static uint64_t payload(const Entry& entry);
  void attachCode(Entry& entry, std::span<const std::byte> arguments);
  void noteLanding(std::span<const std::byte> message);
  void seeLandings(uint64_t word, uint64_t value);
  Entry* entryOf(const Landing& landing);

  const Limits limits_;
  mutable std::mutex mutex_;
  LogStore<Entry> entries_;
  Size ever_, dropped_;
  std::deque<std::pair<uint64_t, std::shared_ptr<const Code>>> entriesCode_;  // by the position of who has it
  std::deque<Cut> cuts_;
  std::vector<Landing> landings_;
  std::map<Digest, std::weak_ptr<const Code>> codes_;  // that loads under way hold
  std::string broken_;                                 // nothing is recorded until the next cut, and why
  bool wanted_ = false, kept_ = false;
  std::atomic<bool> turned_{false}, recorded_{false};
};

// Of a call that is sent again: where its arguments name an address of the worker's staging memory, for each.
void relocateArguments(uint32_t call, std::span<std::byte> arguments, uint64_t from, uint64_t to,
                       uint64_t bytes);

}  // namespace gpupool::client
