// Interrupts: what ends a wait before its time, as a signal's handler does in Python. Included by tokenway.h, which has
// the conventions.
#ifndef TOKENWAY_INTERRUPT_H_
#define TOKENWAY_INTERRUPT_H_

// Threads that wait inside the library call `asked` about every 50 ms, the first time after having waited that long. As
// long as it returns 0 the wait goes on. Else the call ends with twInterrupted, and the sentence says what it waited
// for. It gives its group up, as twGroupAbort does, so that peers hear at once: twPeerAborted, also in twGroupCreate
// and twGroupShrink; while comms are created, twPeerAborted or twPeerDied. twGroupDestroy ends its group all the same.
//
// `asked` may take its time and may call the library, but not the group whose call waits (twInvalidUsage); calls that
// it makes are not interrupted. thread: the only one whose waits are, as gettid() names it (in a forked child it has
// another name); 0: every one. There is one `asked` for the process, which replaces the one before. NULL: nobody is
// asked any more; but a thread may still be in the one before.
TW_API twResult_t twSetInterrupt(int (*asked)(void* context), void* context, int64_t thread);

#endif  // TOKENWAY_INTERRUPT_H_
