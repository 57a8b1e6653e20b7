// What callers read of errors: names of results, the thread's last sentence, a group's record, and the parts of both
// sentences. A part points into the thread's copy of its sentence, so that it stays as it is while another thread
// changes the group's record.
#include <algorithm>
#include <new>
#include <utility>

#include "api/check.h"
#include "api/enter.h"
#include "api/registry.h"

namespace {

using tw::Status;
using tw::api::groups;
using tw::api::last_error;
using tw::api::visit;

// The sentence of the record that this thread has read last, and the one before: a finalizer or a signal's handler may
// read a record while the thread is at the parts of another.
thread_local tw::Sentence recorded;
thread_local tw::Sentence recorded_before;

// Fills in a part. It leaves the last error alone: that is what the caller is reading.
twResult_t show_part(const tw::Sentence& sentence, int32_t index, twErrorPart_t* part) {
  if (index < 0 || static_cast<size_t>(index) >= sentence.parts().size()) return twInvalidArgument;
  const tw::Sentence::Part& found = sentence.parts()[static_cast<size_t>(index)];
  twErrorPart_t known = TW_ERROR_PART_INIT;
  known.kind = found.kind;
  known.text = found.text.c_str();
  known.name = found.name.c_str();
  std::copy(found.indices, found.indices + 2, known.indices);
  known.value = found.value;
  try {
    return tw::api::write_struct("part", known, part).code;
  } catch (const std::bad_alloc&) {  // for the sentence of a bad struct
    return twOutOfMemory;
  }
}

}  // namespace

const char* twResultString(twResult_t result) {
  switch (result) {
#define TW_NAME(name) \
  case name:          \
    return #name;
    TW_NAME(twSuccess)
    TW_NAME(twInvalidArgument)
    TW_NAME(twInvalidUsage)
    TW_NAME(twOutOfMemory)
    TW_NAME(twSystemError)
    TW_NAME(twUnsupported)
    TW_NAME(twConfigMismatch)
    TW_NAME(twPeerRefused)
    TW_NAME(twBoundMismatch)
    TW_NAME(twRecvOverflow)
    TW_NAME(twReplicaMismatch)
    TW_NAME(twTimeout)
    TW_NAME(twPeerDied)
    TW_NAME(twExcluded)
    TW_NAME(twCallMismatch)
    TW_NAME(twPeerAborted)
    TW_NAME(twInternalError)
    TW_NAME(twInterrupted)
#undef TW_NAME
  }
  return "unknown result";
}

const char* twLastError(void) { return last_error.text.c_str(); }

twResult_t twLastErrorPart(int32_t index, twErrorPart_t* part) { return show_part(last_error.sentence, index, part); }

twResult_t twRecordPart(int32_t index, twErrorPart_t* part) { return show_part(recorded, index, part); }

twResult_t twGroupGetError(twGroup_t group, twErrorRecord_t* record) {
  return visit(groups, "group", group, [&]() -> Status {
    tw::poll_device(*group);
    const tw::ErrorRecord known = group->error();
    TW_RETURN_IF_FAILED(tw::api::write_struct<twErrorRecord_t>("record", known, record));
    recorded_before = std::exchange(recorded, known.sentence);
    return {};
  });
}
