@0x87e5e9751949eb67;
# What a server and its workers say to each other, over the worker's own socket pair (descriptor 3, SOCK_SEQPACKET). One
# worker serves one session and then exits. It opens no file by a path: what it needs comes with the start, by SCM_RIGHTS.
# A server starts workers of earlier builds, too. What must not change for them: server/worker_interface.h.

using Cxx = import "/capnp/c++.capnp";
using import "inventory.capnp".DeviceInfo;
using import "inventory.capnp".Id128;
using import "inventory.capnp".LeasedDevice;
$Cxx.namespace("gpupool::schema");

struct WorkerOrder @0x9418d1760ef692e1 {   # server -> worker
  union {
    start @0 :WorkerStart;
    stop @1 :Text;                    # end the session now, and why
    memory @2 :MemoryAnswer;
    suspend @3 :SuspendOrder;         # a socket to the copier comes with it (server/copier/protocol.h)
    resume @4 :Void;
    serve @5 :Void;                   # to the copier: a worker's end of such a socket comes with it
    move @6 :MoveOrder;               # to the old worker: a socket to the copier (not with MoveOrder.stream) and its end
                                      # of the state socket come with it, in this order
    client @7 :Void;                  # to the new worker: the client's socket comes with it
    kept @8 :KeptCheckpoint;          # of a protected session: the server keeps a whole checkpoint of that moment
    share @9 :ShareAnswer;            # the descriptor of what was opened comes with it
    gone @10 :UInt64;                 # the session of that number, which shared events with this one, has ended
    readopt @11 :ReadoptOrder;        # over the worker's door, and only there
    outlive @12 :UInt32;              # to the copier: its door comes with it, and it outlives the server by so many ms, if it
                                      # keeps something then
    adopt @13 :CopierRoom;            # to the copier, over its door, and only there: the server's next life is here, and with
                                      # this comes one end of a new socket pair, which takes the place of descriptor 3. It
                                      # answers `ready`
  }
  clientTransport @14 :Text;          # with client: it comes over this one; empty: over WorkerStart.transport
}
# The server's next life is here, and asks the worker to go on under it. With it comes one end of a new socket pair, which
# takes the place of descriptor 3. The worker's first report over it is `readopted`.
struct ReadoptOrder @0xa8b51d7ef4a6d2c3 {
  session @0 :Id128;                  # as the server's earlier life noted them: a worker that has another session, or this one
  epoch @1 :UInt64;                   # in another life, does not answer
  shares @2 :Bool;                    # the server takes what the session shares (SharedAgain); without that, one that does
                                      # share does not answer either
  held @3 :Bool;                      # the session's lease is held in the files that the session was to go into. A worker that
                                      # was sending it there, and has not heard whether they have their place, sends its client
                                      # away and ends: the socket is open until then, and nothing that is said over it counts.
                                      # Any other worker closes it
  waits @4 :Bool;                     # the server takes a worker that waits for its client (ReadoptReport.waits); without
                                      # that, such a one does not answer
}
struct CopierRoom @0xf5a0d62f3467a9c4 {
  budgetBytes @0 :UInt64;             # of host memory; what it has made ready beyond that stays its own
  folder @1 :Text;                    # for what exceeds it; empty: nothing may
}
# Moves the session to another worker. Both have an end of a socket pair (SOCK_STREAM, the state socket) over which the
# old one sends what the session is, and the new one says whether it has rebuilt it. Old and new worker answer the
# server with `moved` and `rebuilt`.
struct MoveOrder @0xc5de86baf85d894f {
  drainMs @0 :UInt32;                 # as in Manager.suspend
  epoch @1 :UInt64;                   # the session's next
  stream @2 :Bool;                    # the other worker is on another machine: no descriptor can be passed, and all bytes
                                      # go over the state socket, which is a TCP connection
  hold @4 :Bool;                      # with stream: at the other end is who writes the session into a file, and it goes
                                      # there: its client leaves, and no worker waits for it
  copy @3 :Bool;                      # with stream: at the other end is no worker, but who writes the session into a
                                      # file. It goes on here, in any case, and `moved` says whether it is written
  pages @5 :Bool;                     # with copy: it is kept in pages, and who keeps it says first what it has already
                                      # (server/worker/session_pages.h)
  direct @6 :Bool;                    # without stream: the other worker has none of the devices that this one has. The
                                      # memory stays until the client has left, and is copied from device to device
}
struct KeptCheckpoint @0xd245a66ef856abdc {
  frame @0 :UInt64;                   # the last frame and aside call that it has
  aside @1 :UInt64;
}
struct SuspendOrder @0xa5ec5299378d9af5 {
  drainMs @0 :UInt32;                 # as in Manager.suspend
}
# The answer to suspend and to resume, when it is done or has failed.
struct SuspendReport @0xb926c3c082807774 {
  suspended @0 :Bool;                 # what the session is now
  error @1 :Text;                     # not empty: the order was not carried out, and why
  kept @2 :List(UInt64);              # by device of WorkerStart.devices: bytes that stay there, besides its context
  movedBytes @3 :UInt64;
  drainMs @4 :UInt32;
  moveMs @5 :UInt32;
}
enum Descriptor @0x8d376f494dca4ca0 {
  clientSocket @0;                    # the session's bootstrap socket; always there
  moduleCache @1;                     # the tenant's folder; absent: no cache
  deviceLock @2;                      # of a device of the lease: held until the worker's process has ended
  state @3;                           # the state socket (MoveOrder); with WorkerStart.rebuild, and only there
  door @4;                            # a datagram socket on which the worker only receives: if the server dies, its next life
                                      # sends a ReadoptOrder here. Absent: the session ends with the server
}
struct WorkerStart @0xe5804cfc0cb407f8 {
  session @0 :Id128;
  epoch @1 :UInt64;
  transport @2 :Text;
  devices @3 :List(LeasedDevice);   # info.ordinal: the driver's
  networkDevice @4 :Text;
  networkWire @8 :Text;             # "auto", "tcp", "rdma"; empty: auto
  descriptors @5 :List(Descriptor); # what each descriptor is that came with this message, in their order
  moduleCacheBytes @7 :UInt64;      # files in the cache's folder may be so much together
  clientPid @6 :UInt32;
  reportActivity @9 :Bool;          # WorkerReport.activity is wanted: the lease takes turns
  rebuild @10 :Bool;                # the session moves here: the state socket comes instead of the client's, which
                                    # follows with the order `client`
  stream @11 :Bool;                 # with rebuild: as in MoveOrder
  protected @12 :Bool;              # checkpoints of the session will be made, in pages
  holderKeeps @13 :Bool;            # likewise TurnTerms.holderKeeps: when the server dies, the worker ends without a word, for
                                    # the session goes on elsewhere
  awayMs @14 :UInt32;               # with a door: so long the session goes on without a server
  files @15 :Bool;                  # with stream: it is the server that sends the session, from files or from what it keeps.
                                    # When that is rebuilt nobody else has it: with a door it waits for its client also
                                    # while there is no server
}
struct WorkerReport @0xaa8316a7c95c5092 {
  driver @4 :Text;                  # the library that was loaded: later workers are told to load the same
  rowsHash @5 :UInt64;              # of the rows the worker was built with
  walls @14 :List(Text);            # with ready: what stands around this process
  union {
    ready @0 :Void;                 # warm: cuInit done
    devices @1 :List(DeviceInfo);   # answer to --inventory
    ended @2 :Text;                 # the session is over; why, for people
    failed @3 :Text;                # could not start
    lost @6 :DeviceLost;            # a device of the session broke; the session goes on to its end
    memory @7 :MemoryRequest;
    suspended @8 :SuspendReport;
    disturb @9 :Void;               # tests: suspend this session now and resume it, or move it (GPUPOOL_DISTURB)
    activity @10 :Activity;         # when it changes; at the start of a session it is busy
    rebuilt @11 :Text;              # of a new worker, once: not empty: it could not rebuild the session, and why
    moved @12 :MoveReport;          # the answer to `move`, when it is done or has failed
    hindrances @13 :List(Text);     # when it changes: what keeps the session from being moved, for people. At the start of
                                    # a session, and in a new worker's: nothing
    log @15 :LogReport;             # when it changes: what a protected session's client has kept of its calls
    share @16 :ShareReport;
    counts @17 :SessionCounts;        # once a second, when they have changed; and before the end
    readopted @18 :ReadoptReport;     # the client's socket comes with it, and then the lock of each device that has one
  }
}
# The answer to ReadoptOrder. What the worker has told of the session besides it tells again.
struct ReadoptReport @0xd4a4c2c9b07a1f35 {
  taken @0 :List(UInt64);           # by device of WorkerStart.devices: what it has of the lease's memory
  counts @1 :SessionCounts;         # up to now: what the earlier life has heard of, or was to hear
  suspended @2 :SuspendReport;      # null: the session has its memory on its devices
  changing @3 :Bool;                # an order to suspend or to resume it is under way, and `suspended` says nothing: what
                                    # comes of it is told as ever
  shares @4 :UInt32;                # so many reports `share.again` follow
  waits @5 :Bool;                   # its client has not come yet: no socket of it comes with this
}
struct SessionCounts @0xb1c63f7a90d2e845 {              # of this worker alone, from the session's start or arrival
  calls @0 :UInt64;                 # frames that were admitted
  awaited @1 :UInt64;               # of these, with a reply
  toDeviceBytes @2 :UInt64;         # by copies between the client's memory and the devices
  fromDeviceBytes @3 :UInt64;
}
struct LogReport @0xbe2f9135e7cc699a {                  # schema/frame.h: LogBody
  frameBytes @0 :UInt64;
  payloadBytes @1 :UInt64;
  wanted @2 :Bool;                  # it is nearly full: a checkpoint is wanted
  obstacle @3 :Text;                # not empty: why the calls since the last checkpoint could not be made again
}
struct MoveReport @0xc24be24f75bd9a7e {
  error @0 :Text;                   # not empty: the session stays where it was, and why. Empty: its client has gone
                                    # over, and this worker exits
  movedBytes @1 :UInt64;            # of device memory
  drainMs @2 :UInt32;               # until client and device stood still
  pauseMs @3 :UInt32;               # from then until the client had gone over
}
enum Activity @0xd705aa5458b3fb30 {
  busy @0;                          # calls of its program have arrived within the last half second
  quiet @1;                         # none has; what runs on the device is not looked at
  waiting @2;                       # the session is suspended, and a call of its program has arrived
}

# The lease's account of memory: kept by the server for all sessions of a lease together, as one process may not use
# what another has. A worker takes before it allocates, and gives back what it has released; what it still has when its
# process ends is given back by the server.
struct MemoryRequest @0xa3b5f90fa6452f5c {
  ticket @0 :UInt64;                  # of a take: the answer repeats it; 0: no answer is wanted
  place @1 :UInt32;                   # index into WorkerStart.devices; hostMemory: pinned memory of the server
  take @2 :UInt64;                    # bytes
  give @3 :UInt64;
}
const hostMemory @0x91f0b057d4cccdab :UInt32 = 0xffffffff;
struct MemoryAnswer @0x9d52eb848e1abfc4 {
  ticket @0 :UInt64;
  granted @1 :Bool;
  othersBytes @2 :UInt64;             # what the lease's other sessions have in that place
  error @3 :Text;                     # why not, where it is not the lease's limit; for the log
}
# What the sessions of a lease, or of a tenant's leases, share: a worker offers parts of pieces of its memory, and the
# server gives a piece's descriptor to the workers that open such a part. It lives until nobody has it.
struct ShareReport @0xb58992333637339a {
  ticket @0 :UInt64;                  # the answer repeats it; 0: no answer is wanted
  union {
    offer @1 :ShareOffer;             # the piece's descriptor comes with it
    endOffer @2 :ShareKey;
    endPiece @3 :UInt64;              # has ended in this session, and what it has taken for it is given back
    open @4 :ShareKey;
    close @5 :UInt64;                 # ShareAnswer.opening
    again @6 :SharedAgain;            # behind `readopted`, so many as that says. With a piece comes its descriptor
  }
}
# What the session shares, said to the next life of the server that it had it from.
struct SharedAgain @0xe7c1f0a85b3d9264 {
  receipt @0 :Data;                   # ShareAnswer.receipt, of a piece or of an opening; empty with an offer
  opening @1 :UInt64;                 # 0: it is a piece of this session's own, or an offer
  key @2 :ShareKey;                   # of an offer, as of the three below
  piece @3 :UInt64;
  offset @4 :UInt64;
  length @5 :UInt64;
}
struct ShareOffer @0x911c7c30ad5536cd {
  piece @0 :UInt64;                   # the worker's own number of it, from 1
  place @1 :UInt32;                   # as in MemoryRequest; hostMemory: events
  bytes @2 :UInt64;                   # of the piece
  offset @3 :UInt64;                  # what is offered of it
  length @4 :UInt64;
}
struct ShareKey @0xded80d05c292391b {                     # ShareToken in schema/session_calls.h
  server @0 :Id128;
  key @1 :Id128;
}
enum ShareError @0xe93c933369c3827d {
  none @0;
  unknown @1;                         # no such offer
  elsewhere @2;                       # of another tenant or server, or of an earlier life of this one
  own @3;                             # the asking session's
  tooMany @4;                         # offers, or descriptors
}
struct ShareAnswer @0x92e334276c39bc9a {
  ticket @0 :UInt64;
  error @1 :ShareError;
  key @2 :ShareKey;                   # of what was offered
  opening @3 :UInt64;                 # of what was opened: its number, for `close`
  offer @4 :ShareOffer;               # likewise; piece: nothing
  session @5 :UInt64;                 # the asking session's number (WorkerOrder.gone)
  otherDevice @6 :Bool;               # with `elsewhere`: it is the tenant's, but on a device that this lease does not have
  receipt @7 :Data;                   # of the piece, of which something was offered or opened: what the server's next life
                                      # has to know of it, under this one's seal (SharedPiece in schema/store.capnp)
}
struct DeviceLost @0xc9fc4505aaa8d037 {
  ordinal @0 :UInt32;               # the driver's
  text @1 :Text;                    # the driver's error
}
