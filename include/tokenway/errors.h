// The sentences of errors in parts, for programs that show them in the words of another language (the Python package
// does), or that read the argument and its value out of them. twLastError and a record's message are enough for people.
// Included by tokenway.h, which has the conventions.
#ifndef TOKENWAY_ERRORS_H_
#define TOKENWAY_ERRORS_H_

// What a part is. Later versions may have more kinds: show the text of those that are not known.
typedef enum TW_AS_INT {
  twPartText = 0,      // words, and whatever is none of the others
  twPartArgument = 1,  // an argument of the call, or a field of a struct that is one
  twPartValue = 2,     // the integer that this argument has
  twPartLeast = 3,     // the least integer that it may have
  twPartMost = 4,      // the greatest
  twPartConstant = 5,  // a value of an enum
  twPartFunction = 6,  // a function of this API
  twPartUnderWay = 7,  // likewise, one whose call occupies the comm or group: when it has ended, the call that failed
                       // may be made again
} twPartKind_t;

// A part of a sentence. The texts of all parts, one behind the other, are the sentence.
typedef struct {
  size_t size;
  twPartKind_t kind;
  const char* text;
  // What stands there, as C writes it: "twFlat" of a constant, "twDispatch" of a function. Of an argument its path,
  // where "[]" stands for its indices: "config.lanes", "input.payloads[]", "config.payloads[].dtype", "ids[]" ("ids"
  // where all of it is meant). Of a
  // value, least or most the path of the argument that it belongs to. "" of text.
  const char* name;
  int64_t indices[2];  // of the argument; -1 where there is none
  int64_t value;       // of a value, least, most or constant (at most 2^63 - 1, the text being right); else 0
} twErrorPart_t;

#define TW_ERROR_PART_INIT {sizeof(twErrorPart_t), twPartText, NULL, NULL, {-1, -1}, 0}

// Gives the index-th part, counted from 0, of the sentence that twLastError gives. Its strings are valid as long as
// that sentence. Unlike other functions it leaves twLastError as it is, also when it fails. Errors: twInvalidArgument
// past the last part.
TW_API twResult_t twLastErrorPart(int32_t index, twErrorPart_t* part);

// The same of the message of the record that this thread's last twGroupGetError gave; where the record's message was
// cut, the parts are whole. The strings are valid until this thread's next twGroupGetError.
TW_API twResult_t twRecordPart(int32_t index, twErrorPart_t* part);

#endif  // TOKENWAY_ERRORS_H_
