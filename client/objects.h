#pragma once
// What the client knows of the handles it minted. The driver's side of each lives in the worker under the
// same id.

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "client/accepted_settings.h"
#include "client/functions.h"
#include "client/handles.h"
#include "schema/frame.h"
#include "schema/handles.h"
#include "schema/session_calls.h"

namespace gpupool::client {

// A stream's place in order. `posted` counts what was sent; a word carrying that count comes back when it is
// done.
struct Stream {
  CUcontext context = nullptr;
  unsigned flags = 0;
  int priority = 0;
  uint64_t id = 0;  // cuStreamGetId
  uint64_t word = 0;
  std::atomic<uint64_t> posted{0};     // operations sent
  std::atomic<uint64_t> requested{0};  // highest count a word was asked for
  std::atomic<uint64_t> moment{0};     // of the last question that was answered with "not ready"
  std::atomic<bool> capturing{false};
  CUgreenCtx green = nullptr;  // whose stream it is; null: of no green context
  bool ended = false;          // under lockWords: its end was sent, and nothing may follow
};

// A completion word and the value it will come to, read and replaced as one.
struct WordMark {
  uint64_t word : 16;
  uint64_t value : 48;
};
static_assert(schema::kWordsCount <= size_t{1} << 16 && std::atomic<WordMark>::is_always_lock_free);

struct Event {
  CUcontext context = nullptr;
  uint64_t life = 0;  // of that context (Context::id), with which it ends
  unsigned flags = 0;
  std::atomic<WordMark> last{WordMark{0, 0}};  // of the last record
  uint64_t stream = 0;                         // where that was (Stream::id); under event.cpp's mutex
  std::atomic<bool> ever{false};               // recorded at all
  std::atomic<bool> captured{false};           // the last record was part of a capture
  std::atomic<bool> shared{false};             // with other processes: then only the worker knows its records
  // Calls/event.cpp. The moment (Session::nextMoment) of the last record, or of a later question that was
  // answered with "not ready". Networks: the worker was asked at that time, and tells when the word comes to
  // `told`.
  std::atomic<uint64_t> moment{0}, told{0};
  std::atomic<int64_t> asked{0};
  std::atomic<unsigned> unqueried{0};  // records since the last query
};

// Behind a CUlibrary or a CUmodule.
struct Library {
  bool printing = false;  // kernels of it may print; set before its handle is given out
  std::mutex mutex;
  std::vector<std::pair<std::string, uint64_t>> kernels;  // name -> handle: the same kernel has one handle
  std::vector<uint64_t> globals;                          // addresses asked for: they end with it
  std::vector<std::pair<uint64_t, CUmodule>> modules;     // of a library, by life of the context
  // Of a module:
  CUcontext context = nullptr;
  uint64_t life = 0;            // of that context (Context::id)
  CUlibrary library = nullptr;  // whose module it is in this context (cuLibraryGetModule)
};

struct GraphExec {
  std::atomic<bool> accepted{false};              // launched once: later launches may be posted
  AcceptedSettings settings;                      // of its nodes
  std::atomic<WordMark> carried{WordMark{0, 0}};  // of its last launch that copied the program's own memory
};

struct Plain {};  // kinds without state of their own

extern HandleTable<Stream> streams;
extern HandleTable<Event> events;
extern HandleTable<Function> functions;  // CUfunction
extern HandleTable<Function> kernels;    // CUkernel
extern HandleTable<Library> libraries;
extern HandleTable<Library> modules;
extern HandleTable<Plain> graphs;
extern HandleTable<Plain> graphNodes;
extern HandleTable<GraphExec> graphExecs;
extern HandleTable<Plain> arrays;
extern HandleTable<Plain> mipmaps;
extern HandleTable<Plain> links;

// Mints a handle of type T without state.
template <class T>
T mintPlain();
template <>
inline CUgraph mintPlain() {
  return fromId<CUgraph>(graphs.create().id);
}
template <>
inline CUgraphNode mintPlain() {
  return fromId<CUgraphNode>(graphNodes.create().id);
}
template <>
inline CUgraphExec mintPlain() {
  return fromId<CUgraphExec>(graphExecs.create().id);
}
template <>
inline CUarray mintPlain() {
  return fromId<CUarray>(arrays.create().id);
}
template <>
inline CUmipmappedArray mintPlain() {
  return fromId<CUmipmappedArray>(mipmaps.create().id);
}
template <>
inline CUlinkState mintPlain() {
  return fromId<CUlinkState>(links.create().id);
}
template <class T>
inline void dropPlain(T handle) {
  uint64_t id = toId(handle);
  switch (handles::kindOf(id)) {
    case Kind::graph:
      graphs.destroy(id);
      break;
    case Kind::graphNode:
      graphNodes.destroy(id);
      break;
    case Kind::graphExec:
      graphExecs.destroy(id);
      break;
    case Kind::array:
      arrays.destroy(id);
      break;
    case Kind::mipmap:
      mipmaps.destroy(id);
      break;
    case Kind::linkState:
      links.destroy(id);
      break;
    default:
      break;
  }
}

}  // namespace gpupool::client
