#pragma once
// Layout of frames (client -> worker), replies (worker -> client) and control messages (both ways).
// Little-endian, fixed offsets, pinned by tests/golden/.
//
//   call channel, client -> worker        Frame header · arguments as the call's row says
//   call channel, worker -> client        Reply header · outputs as the row says · device output
//   control channel, worker -> client     Notice header · body by type
//   control channel, client -> worker     Notice header · body by type
//
// An aside call (rows of kind Aside) is a frame too, but the body of a notice: the worker serves it when it
// arrives, whatever the frames before it wait for, and answers it on the call channel. What a host function
// needs is sent in this way: work before it on the device may block every frame until the function has
// returned.

#include <cstddef>
#include <cstdint>

namespace gpupool::schema {

inline constexpr uint32_t kProtocolVersion = 7;  // of all of this and hello.h; part of rowsHash() (rows.h)

struct Frame {
  enum Flag : uint32_t {
    kAwait = 1,      // a reply is expected
    kForced = 2,     // a Post sent as Await by GPUPOOL_SYNC or a capture
    kUntilDone = 4,  // of a call that polls, sent again after the worker's death: the program has seen
                     // "done", and so it is answered when that is true
  };
  uint32_t call = 0;  // fnv32 of the call's name
  uint32_t flags = 0;
  uint64_t seq = 0;      // session-wide, from 1, taken under the enqueue lock, never reset; of an aside call:
                         // kAside and a number of its own, from 1
  uint32_t epoch = 0;    // one life of the session on one worker
  uint32_t lane = 0;     // the client thread whose order this keeps
  uint64_t context = 0;  // handle of the context to be current; 0: none
  uint64_t received =
      0;  // highest effect the client has received: replies and notices up to here may be forgotten
  uint64_t aside = 0;  // served behind the aside calls up to this number; those themselves: 0
};
static_assert(sizeof(Frame) == 48);
inline constexpr uint64_t kAside = uint64_t{1} << 63;

struct Reply {
  enum Flag : uint32_t {
    kCapturing = 1,  // some capture is active on the worker
  };
  uint64_t seq = 0;  // of the frame it answers
  uint32_t epoch = 0;
  uint32_t status = 0;  // CUresult
  uint32_t flags = 0;
  uint32_t outputBytes = 0;  // device printf text behind the outputs, for the client's stdout
  uint64_t admitted = 0;     // highest frame seq taken from the ring
  uint64_t completed = 0;    // highest frame seq handed to the driver in order
  uint64_t durable = 0;      // highest frame seq whose payload a standby holds (0: no standby)
};
static_assert(sizeof(Reply) == 48);

enum class NoticeType : uint32_t {
  // worker -> client
  words = 1,      // WordUpdate[]: completion words that moved (networks only)
  failed = 2,     // status, text: the session is over or sticky (a posted call failed, a device fault)
  callback = 3,   // callback id, status: run the host function, then answer callbackDone
  output = 4,     // device printf text
  moved = 5,      // MovedBody: the session goes on at another worker, as that epoch (see "A move" below)
  prepare = 6,    // a move begins: send no frame any more, and answer `stopped`
  drained = 7,    // all frames are done: send nothing at all any more, and answer `quiet`
  errors = 8,     // device output for stderr (text of failed assertions), possibly empty; nothing follows it
  suspended = 9,  // no frame is served before `resumed`
  resumed = 10,
  stay = 11,  // the move has failed: go on as before
  kept = 12,  // KeptBody: the server keeps a whole checkpoint of that moment
  // u64, WordUpdate[]: as `words`. When they had moved, no mirror of that set (sessionMirrorCollect) held
  // anything that the client does not have: it need not ask.
  wordsUnchanged = 13,
  // As `prepare`, of a client that shares memory with this worker: it will not with the next one, and goes on
  // over a network. One that cannot answers `stays`.
  prepareApart = 14,
  // As `drained`, of a session that really goes to another worker, where nothing that the driver has made
  // for it stands on its pinned memory. If that worker is on the client's host, it may take the client's own
  // pages for that (ClientHello.lends). Before `quiet` the client asks for what kernels have written to
  // mirrors.
  drainedToShare = 15,
  // Behind `stopped`: some device waits for what the program calls next. The client lets one frame go, or, if
  // none comes within some milliseconds, none, and answers `stopped` again.
  step = 16,
  // client -> worker
  callbackDone = 64,
  goodbye = 65,  // the client ends in order
  watch = 66,    // word, value: wake me when it is reached
  aside = 67,    // Frame, arguments: an aside call
  stopped = 68,  // StoppedBody: the last frame; the control channel goes on
  quiet = 69,    // StoppedBody: the last aside call; nothing follows before `stay` or `moved`
  left = 70,     // the client goes on at the other worker; nothing follows
  stays = 71,    // the client could not reach the other worker, and goes on at this one
  log = 72,      // LogBody, text: what the client's log of calls holds, when that changes (docs/failover.md)
};

// A move: the session goes on at another worker, which rebuilds it from what this one sends. The client stops
// sending first, so that nothing is under way when the state is read:
//
//   old worker -> client   prepare     or prepareApart
//   client -> old worker   stopped     behind the last frame; no thread of the client sends a frame from here
//                                      on. Host functions and aside calls go on: work under way may need them
//   old worker -> client   step        any number of times: one more frame, and `stopped` again behind it
//   old worker -> client   drained     every frame is served, every device idle, no host function runs; or
//                                      drainedToShare
//   client -> old worker   quiet       behind the last message of the control channel
//   old worker -> client   moved       the other worker has rebuilt the session; or at any time since
//                                      `prepare`: stay
//   client                             asks its holder for the session's next epoch (schema/holder.h), and
//                                      exchanges hellos with the new worker (schema/hello.h)
//   client -> old worker   left        from here on the client accepts nothing of the old worker. It closes
//                                      this connection and sends again to the new one whatever it still
//                                      watches; or, where it could not reach it: stays
//
// What the client says of a move repeats the number of the `prepare` that it answers (Notice.effect): an
// answer to one that was taken back counts nothing. Frames and aside calls keep their numbers, and words
// their values, across a move.

struct Notice {
  NoticeType type{};
  uint32_t epoch = 0;
  uint64_t effect = 0;  // number of this effect, from 1 (worker -> client); of what a client says of a move:
                        // that of the `prepare` that it answers
};
static_assert(sizeof(Notice) == 16);

struct WordUpdate {
  uint64_t index = 0;
  uint64_t value = 0;
};
struct FailedBody {
  uint64_t seq = 0;
  uint32_t status = 0;
  uint32_t call = 0;
  // then: blob with text
};
struct MovedBody {
  uint32_t epoch = 0;  // the next one
  uint32_t held = 0;   // 1: no worker waits: the session is in files. The client says `left` first, and its
                       // holder waits until the session has been restored
};
struct StoppedBody {
  uint64_t last =
      0;  // number of the last frame (stopped) or aside call (quiet, without kAside) sent; 0: none
};
struct KeptBody {
  uint64_t frame = 0, aside = 0;  // numbers of the last frame and aside call that it has
};
// Of a protected session. Then: blob with text: why the calls since the last checkpoint could not be made
// again in another worker; empty: they could.
struct LogBody {
  uint64_t frameBytes = 0, payloadBytes = 0;
  uint32_t wanted = 0;  // 1: it is nearly full, and a checkpoint would empty it
  uint32_t reserved = 0;
};
struct CallbackBody {
  uint64_t id = 0;
  uint32_t status = 0;
  uint32_t reserved = 0;
};

// Completion words: one page set per session and epoch, created by the worker. Word 0 is the session's own:
// `sticky` is the first fatal CUresult, 0 while all is well; `bell` is a futex rung when a watched word
// moved.
struct WordsHeader {
  uint32_t sticky = 0;
  uint32_t bell = 0;
  uint32_t waiters = 0;  // threads of the client asleep on the bell
  uint32_t reserved = 0;
};
inline constexpr size_t kWordsScratch = 32;      // 32 bytes for the worker's first copies; nobody reads them
inline constexpr size_t kWordsOffset = 64;       // first word behind the header
inline constexpr size_t kWordsCount = 32 << 10;  // 8 bytes each
inline constexpr size_t kWordsBytes = kWordsOffset + kWordsCount * 8;

}  // namespace gpupool::schema
