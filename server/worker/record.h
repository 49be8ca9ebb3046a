#pragma once
// The session's record: the calls that would make its objects again in another worker, in the order in which
// they were served (docs/design.md, "What failover needs"). Device memory, pinned memory and mirrors are kept
// by Space and Session, which know what there is of them.
//
// An entry belongs to one object, its subject, and names others, which it uses. It is kept as long as its
// subject lives or is used by an entry that is kept: what a graph was captured from stays while an exec of
// that graph lives, and then goes with it. An object is one life of one handle: a handle that was freed and
// given again is another object. Handles without a life of their own (nodes of a graph, kernels of a library)
// are names of the object that they belong to.
//
// Code that was unloaded stays in the record, its loading and its unloading: it has moved the places of what
// was loaded after it. So do graphs with conditional nodes, whose handles the driver numbers. At most
// kMostUnloaded such objects are kept; when the oldest goes, the driver may choose other values in a rebuilt
// session, which is found there.
//
// A session that is to move lets its first entries go ahead, while it still runs: the other worker serves
// them before the program has to wait. From then on they stay, whatever ends, so that the rest follows there
// as it does here.
//
// Threads: any; a mutex inside.

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "schema/frame.h"
#include "schema/handle_ids.h"

namespace gpupool::server {

class Record {
 public:
  static constexpr size_t kMostUnloaded = 1024;

  struct Entry {
    schema::Frame frame;
    std::vector<std::byte> arguments;  // as they came
    std::vector<std::byte> outputs;    // as they were answered: values that kernels see are among them
    std::vector<uint64_t> names;       // handles that the worker named while it served the call
  };

  // What a call did, in handles. Names that are no handles (textures, captures, devices) are made by the
  // functions below.
  struct Deed {
    uint64_t subject = 0;           // 0: the entry is kept for ever
    bool creates = false;           // the subject's life begins
    bool ends = false;              // it ends
    std::vector<uint64_t> aliases;  // further names of the subject, from now on
    std::vector<uint64_t> uses;
    enum class Kept { always, last, first } kept = Kept::always;  // of entries with the same key and subject
    uint64_t key = 0;
    bool placed = false;  // the subject has moved what the driver chose later: its end does not drop it
  };
  void add(Entry entry, const Deed& deed);
  // The call `entry` ends the life of a context, and of what was made in it and does not outlive it.
  void endContext(uint64_t context, Entry entry);
  // `object` ends as part of another one: `graph` moved into a node of another graph.
  void consume(uint64_t object);
  // From now on `name` is the object that `known` names, too.
  void alias(uint64_t name, uint64_t known);
  bool knows(uint64_t name) const;
  // What lives and has a life of its own, of that kind, with the call that made it.
  std::vector<std::pair<uint64_t, Entry>> living(handles::Kind kind) const;
  // The modules and libraries that live, each with the contexts in which the driver has loaded something of
  // it.
  std::vector<std::pair<uint64_t, uint64_t>> loadedCode() const;
  // Grows whenever what these two say of code and arrays may have changed.
  uint64_t changes() const { return changes_.load(std::memory_order_relaxed); }

  static constexpr uint64_t texture(uint64_t value) { return kTexture | (value & kValue); }
  static constexpr uint64_t surface(uint64_t value) { return kSurface | (value & kValue); }
  static constexpr uint64_t capture(uint64_t id) { return kCapture | (id & kValue); }
  static constexpr uint64_t device(uint64_t ordinal) { return kDevice | ordinal; }

  // Captures that are open: while there are some, calls on streams may belong to one. `capture`: as the
  // driver numbers it. A capture that was invalidated has no number any more; the stream that it began in
  // has. frame: with which it began.
  void captureBegins(uint64_t stream, uint64_t capture, uint64_t frame);
  uint64_t captureEnds(uint64_t stream);
  // The frame with which that open capture began; 0: none did.
  uint64_t captureFrame(uint64_t capture) const;
  bool capturing() const { return captures_.load(std::memory_order_relaxed) > 0; }
  // A capture has failed: nothing is left of it.
  void abandon(uint64_t capture);

  // Entries behind those that have gone ahead, up to the first of another call: they go ahead, too. A copy.
  std::vector<Entry> goAhead(const std::function<bool(uint32_t call)>& may);
  size_t ahead() const;  // how many have
  // Of a session that goes on here: nothing has gone ahead.
  void callBack();

  size_t size() const;
  size_t bytes() const;
  std::vector<Entry> entries() const;  // a copy, in order, of those that have not gone ahead
  bool any(const std::function<bool(const Entry&)>& is) const;  // of all

 private:
  static constexpr uint64_t kTexture = uint64_t{1} << 60, kSurface = uint64_t{2} << 60,
                            kCapture = uint64_t{3} << 60, kDevice = uint64_t{4} << 60, kValue = kTexture - 1;
  struct Object;
  using Life = std::shared_ptr<Object>;
  struct Node {
    Entry entry;
    uint64_t position = 0;
    Life subject;
    std::vector<Life> uses;
    std::pair<uint64_t, uint64_t> key;  // {call and arguments, subject's name}; zero: none
  };
  using Log = std::list<Node>;
  struct Object {
    bool alive = true;
    bool placed = false;
    size_t users = 0;           // entries of others that name it
    std::set<uint64_t> usedAt;  // positions of these
    bool usedBetween(uint64_t position, uint64_t until) const {
      const auto next = usedAt.upper_bound(position);
      return next != usedAt.end() && *next < until;
    }
    std::vector<Log::iterator> entries;
    std::vector<uint64_t> names;
    std::vector<std::weak_ptr<Object>> within;  // of a context: what ends with it, and some that have ended
    size_t lookAgain = 64;                      // at that many, those that have ended are forgotten
  };

  // All under mutex_.
  Life find(uint64_t name);
  void hold(Object& context, const Life& made);
  bool replace(const Entry& entry, const Deed& deed, const Life& subject, std::pair<uint64_t, uint64_t> key);
  Log::iterator append(Entry entry, const Life& subject, const std::vector<uint64_t>& uses);
  void die(const Life& object);
  void forgetNames(const Life& object);
  void dropIfUnused(const Life& object);
  void erase(Log::iterator node, std::vector<Life>& unused);
  bool hasGone(const Node& node) const { return node.position <= gone_; }
  bool hasGone(const Object& object) const;
  static size_t weight(const Entry& entry);

  mutable std::mutex mutex_;
  Log log_;
  uint64_t positions_ = 0;
  size_t ahead_ = 0;   // the first entries of the log
  uint64_t gone_ = 0;  // and the position of the last of them
  size_t bytes_ = 0;
  std::unordered_map<uint64_t, Life> objects_;  // by each of their names
  struct KeyHash {
    size_t operator()(const std::pair<uint64_t, uint64_t>& key) const {
      return key.first ^ (key.second * 0x9e3779b97f4a7c15);
    }
  };
  std::unordered_map<std::pair<uint64_t, uint64_t>, std::vector<Log::iterator>, KeyHash> keyed_;
  std::deque<Life> unloaded_;
  struct Begun {
    uint64_t capture = 0, frame = 0;
  };
  std::unordered_map<uint64_t, Begun> capturesOf_;  // by the stream that each began in
  std::atomic<size_t> captures_{0};
  std::atomic<uint64_t> changes_{0};
};

}  // namespace gpupool::server
