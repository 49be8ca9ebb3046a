#pragma once
// For who stands at the other end of a worker's stream and keeps it (session_file.h, kept_pages.h): the
// record, what follows it by its own word, and how the worker hears what was made of it.

#include <capnp/serialize.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/files/session_file.h"
#include "server/worker/stream_layout.h"

namespace gpupool::server {

inline constexpr char kDamaged[] = "the file is damaged";

struct StreamPlan {
  std::vector<std::byte> bytes;  // of the record
  Digest digest{};
  std::vector<schema::ImageName> images;
  std::vector<uint64_t> contents;

  // bytes and digest are there. "" or what is wrong with them.
  std::string read();
  // What the record says of itself.
  void tell(FileFacts& facts);

 private:
  std::unique_ptr<capnp::FlatArrayMessageReader> message_;
};

// The worker may take long before its first word, since its programs have work to finish: until then `over`
// is asked, ten times a second, whether to give it up: why. "": it has spoken.
std::string awaitWorker(int socket, const std::function<std::string()>& over);
// The last word to it: what became of the stream. What the caller returns.
std::string answerWorker(StateSocket& socket, const std::string& why);

}  // namespace gpupool::server
