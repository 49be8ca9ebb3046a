#pragma once
// Where a move of the session stands (schema/frame.h, "A move"), as its client knows it: what the worker has
// said, what was answered, and what fits next. No clock, no I/O, no threads: the session asks it under a
// lock.

#include <cstdint>

#include "schema/frame.h"

namespace gpupool::client {

class MoveCourse {
 public:
  enum class Stage : uint8_t {
    none,      // no move
    prepared,  // the worker has asked for it, or, behind `stopped`, for one more frame
    stopped,   // said
    drained,   // the worker has served every frame
    quiet,     // said
    moved,     // the other worker waits
    going,     // decided: the session goes on there
    ending,    // decided, and being wound up
  };

  // A notice of the worker's. False: it does not fit, and changes nothing.
  bool hear(schema::NoticeType type, uint64_t effect, const schema::MovedBody& moved);

  // stopped, quiet and going follow prepared, drained and moved. False: the move has ended meanwhile.
  bool reach(Stage stage);
  // The client cannot go where the worker wants to have it. False: the move is over already.
  bool refuse();
  // The client could not reach the other worker. False: the worker said first that the session stays.
  bool fails();
  // Nothing comes from the worker any more. What only it could go on with ends.
  void lose();
  // The worker is gone, and the session is to go on at another one, as if it had been held. False: the
  // program ends, or a move is under way.
  bool failOver(uint32_t epoch);
  // That one is gone, too, before the session was there. False: the program ends.
  bool failOverAgain(uint32_t epoch);
  // The program ends: so does the move, unless it is decided, and no other one begins.
  void leave();
  // The session is at the other worker; the rest is winding up.
  void arrive();
  // All is wound up. True: the worker has asked for the next move already.
  bool end();

  Stage stage() const { return stage_; }
  bool over() const { return stage_ == Stage::none || stage_ == Stage::ending; }
  // Where the session goes on is being found out: the old worker may go without ending it.
  bool open() const { return stage_ == Stage::moved || stage_ == Stage::going; }
  // `quiet` was said to a worker that has not answered, and the program ends: it is told nothing more.
  bool mute() const { return mute_; }
  uint64_t effect() const { return effect_; }  // of the `prepare` that is obeyed
  uint32_t epoch() const { return epoch_; }    // as `moved` said
  bool held() const { return held_; }
  bool mayShare() const { return mayShare_; }  // the worker has said drainedToShare
  bool apart() const { return apart_; }        // the worker has said prepareApart
  bool leaving() const { return leaving_; }    // the program ends

 private:
  Stage stage_ = Stage::none;
  bool again_ = false, leaving_ = false, mute_ = false, held_ = false, mayShare_ = false, apart_ = false,
       nextApart_ = false;
  uint64_t effect_ = 0, nextEffect_ = 0;
  uint32_t epoch_ = 0;
};

}  // namespace gpupool::client
