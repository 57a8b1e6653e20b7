// Leases and kept windows: memory of this rank's window that outlives its step or its group. Included by tokenway.h,
// which has the conventions.
//
// A lease is a part of the window that the caller owns, so that rows which peers write there outlive their step. A
// dispatch otherwise leaves its rows in a bank of the window, which the next steps overwrite: whoever keeps them, as
// training does from a layer's forward to its backward pass, would have to copy them out.
//
// Leases are for high throughput alone, in groups with lease_bytes. What a rank leases and when is its own affair:
// addresses and sizes differ from rank to rank, and a rank may have no lease where others have some.
//
//   1. twWindowAlloc, with room for as many rows as may come: max_recv_tokens rows of a payload, as the exchange of
//      counts has it.
//   2. twExchangeCounts with `landing` (receive offsets), which tells the peers. In groups with leases it may be called
//      again for a handle whose counts are known and which holds no lane: for another dispatch by the same routing, as
//      in a backward pass.
//   3. The handle's next dispatch, and only that one, writes there. In twFlat its output with data == NULL is then the
//      lease. All other outputs are as ever: copies, of rows that lie in the lease instead of in a bank.
//   4. twWindowTrim gives back the part to which no row came, twWindowFree the rest.
//
// From the exchange that announced it to the end of that dispatch a lease belongs to the peers; before and after,
// nobody but this rank writes there. An announcement says, as a published signal does, that this rank has read what was
// there before: on a device in stream order. So a lease that was freed may be leased again while kernels still read it,
// if these kernels come before the exchange that announces it next, in the order of streams.
#ifndef TOKENWAY_LEASES_H_
#define TOKENWAY_LEASES_H_

// Leases `bytes` of this rank's window: *memory is aligned to 256, device memory on the CUDA backend; its contents are
// what was there. Waits for nobody, sends nothing; may be called from any thread, beside the calls of the group.
// Errors: twInvalidArgument; twInvalidUsage for a group without lease_bytes; twOutOfMemory where no gap is large
// enough, which leaves the group as it was: rows are then copied out of the bank.
TW_API twResult_t twWindowAlloc(twGroup_t group, uint64_t bytes, void** memory);

// Gives back the part of a lease beyond `bytes`, which is from 1 to what the lease has. Errors: twInvalidUsage while a
// dispatch that the lease was announced for is to come or under way. From any thread.
TW_API twResult_t twWindowTrim(void* memory, uint64_t bytes);

// Gives a lease back. If a dispatch that it was announced for is to come or under way, nobody else gets the memory
// before that dispatch has ended. A lease may outlive its group: the window is then unmapped with its last lease, on a
// device when what runs there has ended. Never waits for a device. From any thread, such as one that collects garbage.
// Errors: twInvalidArgument for a pointer that is no lease.
TW_API twResult_t twWindowFree(void* memory);

// A group's memory for leases, as twGroupLeaseInfo tells it; zeros for a group without any.
typedef struct {
  size_t size;
  uint64_t bytes;    // in all, for leases: lease_bytes in whole pages
  uint64_t used;     // leased, or freed and still announced
  uint64_t largest;  // the largest lease that could be taken now
  int32_t leases;
} twLeaseInfo_t;

// Tells how much of a group's memory for leases is used. From any thread.
TW_API twResult_t twGroupLeaseInfo(twGroup_t group, twLeaseInfo_t* info);

// Tells how far each lane is. steps[l] is a number that changes with each step that this rank begins on lane l, by
// whatever call; `lanes`: how many lanes there are (twGroupInfo). A view of the window is over when its lane's number
// is no longer what it was after the call that showed the view. Steps that replays of a CUDA graph make do not change
// the number. Errors: twInvalidArgument.
TW_API twResult_t twGroupSteps(twGroup_t group, int32_t lanes, uint32_t* steps);

typedef struct twWindowKeeper* twWindowKeeper_t;

// Keeps this rank's window mapped until twWindowRelease, beyond its group too. Views of it (rank_major and flat of a
// dispatch, rank_major of a gather) then stay readable and writable after twGroupDestroy, and show what was last there.
// Peers have let go of the window by then, so nobody else writes there any more, except peers that have not noticed yet
// that a group was given up. While the group lives, its steps overwrite views as ever. Nobody waits for this, and no
// memory of a peer is kept. From any thread, beside the calls of the group. Errors: twInvalidArgument.
TW_API twResult_t twWindowKeep(twGroup_t group, twWindowKeeper_t* keeper);

// Ends what twWindowKeep began. The window is unmapped with its group or its last keeper or lease, whichever comes
// last; on a device when what runs there has ended, for which this call does not wait. From any thread, such as one
// that collects garbage, and also after the comm's end. Errors: twInvalidArgument for what is no keeper, or no longer
// one. A forked child has the views but no keeper, and gets the same error.
TW_API twResult_t twWindowRelease(twWindowKeeper_t keeper);

#endif  // TOKENWAY_LEASES_H_
