#pragma once
// The session's record (docs/design.md, "What failover needs"): what would rebuild it elsewhere. An ordered
// log of creations, destructions and setters with every value the driver returned that kernels may hold
// (DeviceValue), compacted as objects die; extents and pinned memory are kept by Space. And the reasons why
// it could not be rebuilt.
//
// Threads: any; a mutex inside.

#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "schema/frame.h"

namespace gpupool::server {

class Record {
 public:
  struct Entry {
    schema::Frame frame;           // call, seq, context
    std::vector<std::byte> bytes;  // arguments as they came
    uint64_t subject = 0;          // object created or set; the entry dies with it. 0: never dies
    std::vector<uint64_t> values;  // DeviceValues the driver returned, to be verified on rebuild
  };

  void append(Entry entry);
  // `subject` is gone: its creation and settings need no replay. Entries with DeviceValues stay with their
  // destruction, because the driver reuses such values in an order that a rebuild has to repeat.
  void forget(uint64_t subject);
  void unrestorable(const std::string& reason);

  size_t size() const;
  size_t bytes() const;
  std::vector<Entry> entries() const;  // a copy, in order
  std::set<std::string> reasons() const;

 private:
  mutable std::mutex mutex_;
  std::list<Entry> log_;
  std::multimap<uint64_t, std::list<Entry>::iterator> bySubject_;
  size_t bytes_ = 0;
  std::set<std::string> reasons_;
};

}  // namespace gpupool::server
