#pragma once
// Sends what a session has sent since its checkpoint again, to the worker that has restored it, and compares
// what comes of it with what the program has seen (CallLog).
//
// Entries go in their order, under their own numbers. Where the program had seen a word or a reply, or had a
// host function begin, replay waits until it has come again: what was sent behind that may rely on it. A host
// function does not run again: the worker is told that it has run where the program had said so. Calls whose
// answers the program waits for still are answered by it; what the worker says that the program has not seen
// yet is kept back until the end (`unseen`), so that the program sees nothing of a replay that fails.
//
// One thread, which alone uses the connection's receiving ends and may send on both channels.

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "client/call_log.h"
#include "transports/transport.h"

namespace gpupool::client {

class Replay {
 public:
  struct Target {
    transport::Connection& connection;
    uint32_t epoch = 0;
    transport::Region staging;
    std::map<uint64_t, transport::Region> pinned;  // the worker's, by address; follows what is replayed
    // Where the worker may put bytes for pinned memory of ours at that address. False: it is not there any
    // more.
    std::function<bool(uint64_t address, transport::Region& region, uint64_t& offset)> lent;
  };
  struct Settings {
    bool goOnDifferent = false;  // contents that differ are counted, and no error
    std::chrono::seconds stall{60};
    std::function<bool()> cancelled = [] { return false; };
  };
  struct Counts {
    uint64_t calls = 0, kernels = 0, transfers = 0;
    uint64_t compared = 0;   // answers, downloads
    uint64_t different = 0;  // of these
    std::string first;       // the first one that differed, for people
  };

  Replay(std::vector<CallLog::Entry*> entries, Target target, Settings settings);
  ~Replay();

  // "" or why it ends, for people.
  std::string run();
  const Counts& counts() const { return counts_; }
  const std::map<uint64_t, transport::Region>& pinned() const { return target_.pinned; }
  // In the order in which they came.
  using Message = std::vector<std::byte>;
  const std::vector<Message>& unseenReplies() const { return unseenReplies_; }
  const std::vector<Message>& unseenNotices() const { return unseenNotices_; }    // all but words
  const std::string& unseenOutput() const { return unseenOutput_; }               // what kernels print
  const std::unordered_map<uint64_t, uint64_t>& words() const { return words_; }  // values by index

 private:
  using Entry = CallLog::Entry;
  struct Scratch {
    const Entry* read = nullptr;
    uint64_t word = 0, value = 0, bytes = 0;
    std::shared_ptr<transport::SharedMemory> memory;
    transport::Region region;
  };
  void step(const Entry& entry);
  void send(const Entry& entry);
  void sendFrame(const Entry& entry);
  // Where the bytes of a sessionRead are to go.
  void redirect(const Entry& entry, std::span<std::byte> arguments);
  // Where the worker has not the code that this names a piece of.
  void sendCode(const Entry& entry, schema::Frame frame);
  std::span<const std::byte> bytesOf(const CallLog::Code& code);
  void hearOffer(const Entry& offer, std::span<const std::byte> outputs);
  void noteHostCall(const schema::Frame& frame, std::span<const std::byte> arguments);
  void put(const Entry& entry);
  void get(const Entry& entry);
  bool place(const Entry& entry, uint64_t bytes, transport::Region& region, uint64_t& offset);
  bool arrives(transport::Transfer transfer);
  void awaitWord(uint64_t index, uint64_t value);
  void awaitReply(uint64_t seq);
  void awaitCallback(const Entry& called);
  void endCallback(const Entry& returned);
  void compareScratch();
  void comparePrints();
  void commit(transport::Channel channel, std::span<const std::byte> message);
  // Takes what has come; nothing: naps. Ends the replay where nothing can come any more.
  void pump();
  void hearReply(std::span<const std::byte> message);
  void hearNotice(std::span<const std::byte> message);
  void compare(const Entry& call, const Entry& reply, const schema::Reply& header,
               std::span<const std::byte> outputs);
  void differs(const std::string& what, bool contents);
  void fail(const std::string& why) {
    if (why_.empty()) why_ = why;
  }

  std::vector<Entry*> entries_;
  Target target_;
  Settings settings_;
  Counts counts_;
  std::string why_;
  std::unordered_map<uint64_t, const Entry*> calls_, replies_;  // by Frame.seq
  std::unordered_map<uint64_t, bool> answered_;
  std::unordered_map<uint64_t, uint64_t> hostMaps_;  // address, by the seq of its sessionHostMap
  std::unordered_map<uint64_t, uint64_t> words_;     // as the new worker says
  std::vector<Scratch> scratch_;
  std::vector<Message> unseenReplies_, unseenNotices_;
  std::vector<Message>
      callbacks_;  // host functions that are to run, so far as the program had not begun them
  std::string printed_, unseenOutput_;  // by the new worker's kernels; what of it the program has not seen
  std::set<Digest> images_;             // that the new worker's server has
  const CallLog::Code* read_ = nullptr;
  Message code_;  // its bytes
  Message buffer_;
  std::chrono::steady_clock::time_point lastHeard_;
};

}  // namespace gpupool::client
