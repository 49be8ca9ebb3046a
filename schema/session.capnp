@0xde93fac260af622d;
# What a server and whoever connects to it for a session say to each other: a holder, or a server that the session leaves.

using Cxx = import "/capnp/c++.capnp";
using import "inventory.capnp".Id128;
$Cxx.namespace("gpupool::schema");

# The handshake on a session's socket, before the worker takes the socket over. Each is one message in the standard
# stream framing. holder -> server: SessionHello; server -> holder: SessionChallenge; holder -> server: SessionProof;
# server -> holder: SessionAnswer. After `ok` the socket belongs to the worker on that side, and the holder passes its
# end to the application. Both sides prove the key: proof = HMAC-SHA256(key, role ‖ session ‖ epoch ‖ clientNonce ‖
# serverNonce ‖ server name), role "holder" or "server"; schema/handshake.h fixes the bytes.
struct SessionHello @0x8709141f53d288a4 {
  protocol @0 :UInt32;        # this and oldest: as in Manager.login
  rowsHash @1 :UInt64;        # the client's: which of the server's worker programs serves it. Of who wants no session: nothing
  lease @2 :Id128;
  session @3 :Id128;
  epoch @4 :UInt64;           # 1 for a new session; of one that has moved: its next
  clientNonce @5 :Data;       # 32 bytes
  transport @6 :Text;         # "shm" or "ucx"
  pid @7 :UInt32;             # of the application, for people
  command @8 :Text;           # for people
  arrives @9 :Bool;           # not from a holder: from the server that the session leaves, which knows the lease's key,
                              # too. After `ok` this socket is the state stream (MoveOrder) of the worker that rebuilds
                              # the session; its client comes later, with the same session and epoch.
  asks @10 :Bool;             # no session: the holder asks for what NVML says of the lease's devices. After `ok`: FiguresQuery
                              # and FiguresReport in turns, until one of the two closes. Also of a suspended lease.
  keeps @11 :Bool;            # no session: the holder keeps the checkpoints of the lease's sessions. After `ok`, for each one:
                              # server -> holder: SessionCheckpoint, and its bytes; holder -> server: CheckpointAnswer.
                              # A standby comes in the same way: epoch is Lease.standbyEpoch then, and command its name.
  brings @12 :SessionCheckpoint;  # null: none. The holder brings the session's last checkpoint, and what this server has of
                              # the session ends. After `ok`: holder -> server: its bytes; server -> holder: CheckpointAnswer.
                              # Then the client comes, with the same session and epoch.
  oldest @13 :UInt32;
  release @14 :Text;          # of gpupool, there; for people
  handsTo @15 :Id128;         # not all zero: the holder has this server hand the session's checkpoint on, which it keeps as
                              # the lease's standby, to the server of this incarnation, where the lease is now; that may be
                              # this one. session and epoch: as the client has them next. After `ok`: server -> holder:
                              # HandAnswer.
  over @16 :Bool;             # no session: as handsTo, but the session's program has ended, and its checkpoint may go
  transportNamed @17 :Bool;   # the user has named the transport: the session goes on over no other one
}
# A session in a file (server/files/session_file.h), whose bytes follow this message.
struct SessionCheckpoint @0x8517855b8c278677 {
  number @0 :UInt64;          # of all that this connection brings, from 1
  session @1 :Id128;
  epoch @2 :UInt64;           # in which it was made
  clientPid @3 :UInt32;
  command @4 :Text;           # for people
  transport @5 :Text;
  bytes @6 :UInt64;           # 0, of what a holder brings: nothing was kept, and the session begins anew
  digest @7 :Data;            # FileFacts', 32 bytes; empty where there are no bytes
  lastFrame @8 :UInt64;
  lastAside @9 :UInt64;
  driverVersion @10 :UInt32;
  # From a server: the checkpoint that this connection has brought of the session, and whose blocks these name; 0: none.
  base @11 :UInt64;
  blocks @12 :List(CheckpointBlock);  # empty: all bytes follow. Else those of the new blocks do, in their order
}
struct CheckpointBlock @0xfceb756c3a060cdb {
  bytes @0 :UInt32;           # 1 to 4 MiB; of all together: SessionCheckpoint.bytes
  base @1 :UInt32;            # the number of a block of the base that has the same bytes, from 1; 0: a new one
}
struct CheckpointAnswer @0xea89ead957b643aa {
  number @0 :UInt64;          # SessionCheckpoint.number
  error @1 :Text;             # empty: it is there, whole. Else why not, for people
  later @2 :Bool;             # there is no room for it now, and may be later
}
struct HandAnswer @0xc6a1f2d3b7e84955 {
  verdict @0 :HandVerdict;
  error @1 :Text;             # for people
}
enum HandVerdict @0xb3d94c1e60a7f285 {
  later @0;                   # it is under way, or cannot be now, and why: ask again
  handed @1;                  # the other server restores it
  nothing @2;                 # nothing is kept of it here
  over @3;                    # it was handed on several times, and does not go on: no more
}
struct SessionChallenge @0x87e6a63dbe5322fb {
  serverNonce @0 :Data;
  proof @1 :Data;             # the server's own
  protocol @2 :UInt32;        # of this connection; refused for its version: the server's
  rowsHash @3 :UInt64;        # the client's, if the server has a worker program for it; else that of its current one
  error @4 :Text;             # not empty: refused (unknown lease, version or rows mismatch naming both), socket closes
  unknownLease @5 :Bool;      # refused: the lease is over, or was granted before this server was started again
  otherVersion @6 :Bool;      # refused for that. Before version 9 one of the two numbers above was another one then
}
struct SessionProof @0xebed83f8230ae07d { proof @0 :Data; }
struct SessionAnswer @0xb7ade222783b7e38 {
  ok @0 :Bool;
  error @1 :Text;
  suspended @2 :Bool;         # refused only for now, because the lease is suspended: ask again
}

# What NVML says of the lease's devices, now.
struct FiguresQuery @0xd3d281d56ffbe589 { maxAgeMs @0 :UInt32; }   # no older, if that can be had within a second
struct FiguresReport @0x803fe5b627a51881 {
  devices @0 :List(Data);     # of the lease, in its order: schema/nvml_figures.h; empty: not now, and why
  ageMs @1 :UInt32;           # since the figures that change were taken
  error @2 :Text;
}
