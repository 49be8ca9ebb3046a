#pragma once
// Between an application's client library and its lease holder, a process of the `gpupool` tool on the same
// host.
//
// The holder is a process of its own (docs/design.md, "Why a holder process"): it holds the token, the
// session key and the Cap'n Proto RPC event loop, none of which belong into other people's processes; it
// renews the lease while the application is paused; and Debian's static KJ archives cannot be linked into a
// shared library (their thread-locals are local-exec).
//
// Wire: a SOCK_SEQPACKET Unix socket, host byte order. One datagram asks; any number of replies with
// Status::waiting, one every kWaitingIntervalMs while the lease, or its resuming, is waited for, precede the
// one that answers. A client gives up a holder that says nothing for kSilenceBoundMs; how long a lease is
// waited for is the holder's to bound (gpupool run --wait, GPUPOOL_WAIT). The client finds it at
// GPUPOOL_HOLDER=@<abstract name> (set by `gpupool run`) or =<path>, and speaks to a process of its own user
// or root only; or it starts `gpupool hold --descriptor 3` itself with one end of a socket pair as
// descriptor 3. The holder serves a connection until the peer closes it; the one started by a client releases
// the lease and exits then. The session's connected bootstrap socket comes with OpenReply by SCM_RIGHTS.

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace gpupool::holder {

// The address of that name, and its size; 0 if it is too long. Abstract names need no file, which would stay
// behind a holder that was killed.
inline socklen_t socketAddress(const char* name, sockaddr_un& address) {
  const size_t length = std::strlen(name);
  address = {};
  address.sun_family = AF_UNIX;
  if (length >= sizeof address.sun_path) return 0;
  std::memcpy(address.sun_path, name, length);
  if (name[0] != '@') return sizeof address;
  address.sun_path[0] = '\0';
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
}

// An abstract name belongs to whoever has bound it: the other end must be a process of this user, or root's.
inline bool peerIsOurs(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         (peer.uid == ::geteuid() || peer.uid == 0);
}

// Where a holder that a client library has started takes connections, too: of what else in that process asks
// for its lease, as libnvidia-ml.so.1 does.
inline std::string holderOfProcess(int pid) { return "@gpupool-hold-" + std::to_string(pid); }

inline constexpr uint32_t kMagic = 0x47505531;  // "GPU1"
inline constexpr uint32_t kVersion = 8;

struct OpenRequest {
  uint32_t magic = kMagic;
  uint32_t version = kVersion;
  uint64_t rowsHash = 0;
  int32_t pid = 0;
  // With epoch: 1: it has left its worker already, and is nowhere until it is restored. 2: it has lost its
  // server, and the holder finds another one for it, where it keeps its checkpoints.
  uint32_t left = 0;
  char transport[16] = {};  // of base/transport_names.h; empty: the holder chooses
  char command[128] = {};   // for people
  // Of a session that has moved (schema/frame.h): its id and its next epoch. All zero: a new session.
  uint64_t sessionHigh = 0, sessionLow = 0;
  uint64_t epoch = 0;
  // With epoch: 1: where it can be reached over a transport that shares memory, the holder may choose that.
  uint32_t mayShare = 0;
  uint32_t reserved = 0;
};

enum class Status : uint32_t {
  ok = 0,
  noManager = 1,   // no pool manager reachable
  noDevice = 2,    // nothing free, and who holds it
  refused = 3,     // token, or a wish that the pool does not grant
  serverLost = 4,  // the leased server does not answer
  internal = 5,
  mismatch = 6,     // gpupool of another version somewhere
  nothingFits = 7,  // the pool has no such device, free or not
  leaseEnded = 8,   // the lease is over: expired or revoked
  waiting = 9,      // no answer yet: another reply follows
};
inline constexpr int kWaitingIntervalMs = 10'000;
inline constexpr int kSilenceBoundMs = 60'000;

struct OpenReply {
  uint32_t magic = kMagic;
  uint32_t version = kVersion;
  Status status = Status::ok;
  uint32_t deviceCount = 0;
  uint64_t sessionHigh = 0, sessionLow = 0;
  uint64_t epoch = 0;
  char transport[16] = {};
  char networkDevice[32] = {};
  char server[64] = {};
  uint32_t stallMs = 0;        // a worker that does nothing for so long is given up; 0: never
  uint32_t goOnDifferent = 0;  // 1: --on-divergence=continue
  // Of a protected lease: what the client may keep of its calls, and of what they refer to, in bytes. Not
  // protected: 0.
  uint64_t logFrameBytes = 0, logPayloadBytes = 0;
  uint32_t keeps = 0;  // 1: the holder keeps the checkpoints: a session that has lost its server may go on
  // With keeps, while what was sent since the checkpoint, or since the beginning, can be made again: instead
  // of stallMs; 0: stallMs.
  uint32_t silenceMs = 0;
  // status != ok: one line that says what happened and what to do; with waiting, what is waited for besides a
  // lease, for the program's user.
  char text[512] = {};
};
static_assert(sizeof(OpenRequest) == 200 && sizeof(OpenReply) == 696);

// What NVML says of the lease's devices: asked by our libnvidia-ml.so.1 (client/nvml) on a connection of its
// own. Each request is answered by one datagram, a FiguresReply and behind it `bytes` of the device's
// NvmlFigures (schema/nvml_figures.h), within kFiguresBoundMs. Nothing of it needs a session.
inline constexpr uint32_t kFiguresMagic = 0x47505546;  // "GPUF"
inline constexpr int kFiguresBoundMs = 2'500;
inline constexpr uint32_t kNoAgeMs = 24 * 3600 * 1000;  // the age of figures that NVML has not told yet

struct FiguresRequest {
  uint32_t magic = kFiguresMagic;
  uint32_t version = kVersion;
  uint32_t number = 0;  // the reply repeats it
  uint32_t device = 0;  // of the lease
  uint32_t maxAgeMs = 0;
  uint32_t reserved = 0;
};

struct FiguresReply {
  uint32_t magic = kFiguresMagic;
  uint32_t version = kVersion;
  uint32_t number = 0;
  // ok: the figures are no older than was asked for. serverLost: the server does not answer; the figures,
  // where there are some, are the last ones. leaseEnded. refused: there is no such device.
  Status status = Status::ok;
  uint32_t ageMs = 0;
  uint32_t bytes = 0;
  char text[256] = {};  // status != ok: why, for people
};
static_assert(sizeof(FiguresRequest) == 24 && sizeof(FiguresReply) == 280);

}  // namespace gpupool::holder
