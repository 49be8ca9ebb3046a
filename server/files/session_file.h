#pragma once
// A session in a file: what its worker sends as a stream (server/worker/session_state.h), in that order and
// with the digests and checksums that it carries.
//
//   8 bytes: the record's length; the record; its digest
//   the code images of the record (imagesOf)
//   of each part of the contents: 8 bytes: its length; the bytes; their checksum
//
// Who writes the file stands where a worker would that rebuilds the session: it lacks all images, and is
// content as long as all goes well. Who reads it stands where the old worker would. A worker and a file are
// taken for hostile. These calls take as long as the disk does: a thread of their own has them.

#include <functional>
#include <string>
#include <vector>

#include "base/hmac.h"
#include "server/worker/state_socket.h"

namespace gpupool::server {

struct FileFacts {
  uint64_t bytes = 0;
  Digest digest{};                        // schema::CheckpointSession.digest
  uint64_t lastFrame = 0, lastAside = 0;  // SessionRecord's, as those that follow
  uint64_t rowsHash = 0;
  int driverVersion = 0;
};

// Of a file that was written: its bytes, block by block. Equal ones have the same checksum.
struct FileBlock {
  Checksum checksum{};
  uint32_t bytes = 0;
};
inline constexpr uint32_t kMostBlockBytes = uint32_t{2} << 20;

// Each: "" or why the file is not written.
struct TakeDownSteps {
  // First: the session stands still. What the record says of it is in the facts.
  std::function<std::string()> stands = [] { return ""; };
  std::function<std::string()> written = [] { return ""; };  // last: it is whole, and on the disk
  std::vector<FileBlock>* blocks = nullptr;                  // to be filled; null: nobody asks
};

// Takes down in the empty `file` what comes. "" or why not, for people; the worker has been told then.
std::string takeDown(StateSocket& socket, int file, FileFacts& facts, const TakeDownSteps& steps = {});
// Likewise, from a socket that stays the caller's. The worker may take long before its first word, since its
// programs have work to finish: until then `over` is asked, ten times a second, whether to give it up: why.
std::string takeDown(int socket, const std::function<std::string()>& over, int file, FileFacts& facts,
                     const TakeDownSteps& steps = {});

// Reads the whole file. "" or why it is not the one that `expected` tells of. found: what it is of.
std::string checkFile(int file, const FileFacts& expected, FileFacts* found = nullptr);

// Sends a file that was checked to a worker that rebuilds the session from it. "" or why it has not.
std::string playBack(StateSocket& socket, int file);

}  // namespace gpupool::server
