#pragma once
// The pieces of a session's device memory, to be read or written one after the other: each with a context of
// its device current, at an address at which that reads and writes it. Everything stands still.
//
// Belongs to one thread, which has the same context current before and behind it.

#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/worker/session.h"

namespace gpupool::server {

// For whoever copies one part while the one before is sent. On a thread of its own, or, where there is none
// to be had, on the caller's when it asks for the result.
template <class Work>
std::future<std::string> beside(Work work) {
  return std::async(std::launch::async | std::launch::deferred, std::move(work));
}

class DevicePieces {
 public:
  using List = std::shared_ptr<const std::vector<Space::PieceState>>;
  // Behind takeStock, or adopt and comeBack. list: those of the session, where they are known.
  explicit DevicePieces(Session& session, List list = nullptr)
      : session_(session), space_(session.space()), list_(list != nullptr ? std::move(list) : of(session)) {}
  static List of(Session& session) {
    return std::make_shared<const std::vector<Space::PieceState>>(session.space().describe());
  }
  ~DevicePieces();
  DevicePieces(const DevicePieces&) = delete;
  DevicePieces& operator=(const DevicePieces&) = delete;

  // Before any of the others. Each: "" or why not, for people.
  std::string prepare();
  // Makes the context of the piece's device current; the address is there until another piece is opened.
  std::string open(size_t piece, CUdeviceptr& address);
  // Whether the address of the piece that is open stays when another one is opened.
  bool stays() const { return space_.staysOpen(open_, address_); }
  void close();
  // A context of that device of the lease is current.
  std::string enter(unsigned device);
  CUcontext context(unsigned device) const { return contexts_.at(device); }
  // The same, if it is the session's; else null.
  CUcontext ownContext(unsigned device) const;

  const std::vector<Space::PieceState>& all() const { return *list_; }
  uint64_t bytes() const { return bytes_; }
  std::string failed(const char* call, CUresult result) const;

 private:
  Session& session_;
  Space& space_;
  const List list_;
  uint64_t bytes_ = 0;
  CUcontext before_ = nullptr;              // the calling thread's
  std::map<unsigned, CUcontext> contexts_;  // by device of the lease
  std::vector<CUdevice> retained_;
  size_t open_ = SIZE_MAX;  // the piece that is open, and where
  CUdeviceptr address_ = 0;
};

}  // namespace gpupool::server
