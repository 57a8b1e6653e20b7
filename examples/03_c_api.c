// A round trip in C: processes of this host send tokens to their experts and get the sums back.
//
//   cc -std=c11 examples/03_c_api.c -Iinclude -Lbuild -ltokenway -Wl,-rpath,$PWD/build -o /tmp/c_api && /tmp/c_api
//
// Every process is a rank. Expert e multiplies a row by e + 1, so a row that went astray gives a wrong sum; all numbers
// are chosen so that float32 holds them exactly, and the results are compared without tolerance.
#define _DEFAULT_SOURCE  // fork and getpid beside -std=c11

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <tokenway/tokenway.h>
#include <unistd.h>

enum { kRanks = 3, kExperts = 8, kTopK = 2, kHidden = 64, kMaxTokens = 16 };

// Ends the process with the library's own sentence.
static void check(twResult_t result, const char* call) {
  if (result == twSuccess) return;
  fprintf(stderr, "%s: %s: %s\n", call, twResultString(result), twLastError());
  exit(1);
}
#define CHECK(call) check((call), #call)

static twTensor_t matrix(void* data, twDtype_t dtype, int64_t rows, int64_t columns) {
  twTensor_t tensor = {.data = data, .dtype = dtype, .ndim = 2};
  tensor.shape[0] = rows;
  tensor.shape[1] = columns;
  tensor.stride[0] = columns;
  tensor.stride[1] = 1;
  return tensor;
}

// What rank r owns: 5, 4, 3 tokens; each goes to two experts, but for the first one, which has only one.
static int tokens_of(int rank) { return 5 - rank; }
static float value(int rank, int t, int h) { return (float)(rank * 1000 + t * 100 + h); }
static int32_t expert(int rank, int t, int k) { return t == 0 && k == 1 ? -1 : (rank + 3 * t + 5 * k) % kExperts; }
static float weight(int k) { return k == 0 ? 0.75f : 0.25f; }

// Where experts live when a group is not told: in blocks, the first ranks holding one more.
static int first_expert(int rank) {
  const int more = kExperts % kRanks;
  return rank * (kExperts / kRanks) + (rank < more ? rank : more);
}

static twGroup_t create_group(twComm_t comm) {
  twGroupConfig_t config = TW_GROUP_CONFIG_INIT;
  config.num_experts = kExperts;
  config.top_k = kTopK;
  config.max_tokens = kMaxTokens;
  config.num_payloads = 1;
  config.payloads[0].dtype = twFloat32;
  config.payloads[0].elements = kHidden;
  config.combine_dtype = twFloat32;
  config.combine_elements = kHidden;
  config.timeout_ms = 10000;
  twGroup_t group = NULL;
  CHECK(twGroupCreate(&group, comm, &config));
  return group;
}

static twHandle_t route(twGroup_t group, int rank) {
  int32_t ids[kMaxTokens][kTopK];
  float weights[kMaxTokens][kTopK];
  const int tokens = tokens_of(rank);
  for (int t = 0; t < tokens; ++t) {
    for (int k = 0; k < kTopK; ++k) {
      ids[t][k] = expert(rank, t, k);
      weights[t][k] = weight(k);
    }
  }
  const twTensor_t ids_tensor = matrix(ids, twInt32, tokens, kTopK);
  const twTensor_t weights_tensor = matrix(weights, twFloat32, tokens, kTopK);
  twHandle_t handle = NULL;
  CHECK(twHandleCreate(&handle, group, &ids_tensor, &weights_tensor, NULL));
  return handle;
}

// Dispatches, runs this rank's experts, combines into sums. Returns the number of rows received.
static int round_trip(twGroup_t group, twHandle_t handle, int rank, float (*sums)[kHidden]) {
  static float tokens[kMaxTokens][kHidden];
  static float rows[kRanks][kMaxTokens][kHidden];
  for (int t = 0; t < tokens_of(rank); ++t) {
    for (int h = 0; h < kHidden; ++h) tokens[t][h] = value(rank, t, h);
  }

  twDispatchInput_t input = TW_DISPATCH_INPUT_INIT;
  input.payloads[0] = matrix(tokens, twFloat32, tokens_of(rank), kHidden);
  twDispatchOutput_t output = TW_DISPATCH_OUTPUT_INIT;  // rank_major: views, nothing copied
  CHECK(twDispatch(group, handle, &input, &output));

  // Views of the library's memory: nothing was copied.
  const float(*received)[kMaxTokens][kHidden] = output.payloads[0].data;  // by source and slot
  const int32_t(*ids)[kMaxTokens][kTopK] = output.ids.data;               // experts of this rank, from 0; or -1
  const float(*weights)[kMaxTokens][kTopK] = output.weights.data;
  const int32_t* counts = output.counts.data;

  int total = 0;
  for (int source = 0; source < kRanks; ++source) {
    total += counts[source];
    for (int slot = 0; slot < counts[source]; ++slot) {
      float factor = 0;  // the weighted sum over the experts that this rank has
      for (int k = 0; k < kTopK; ++k) {
        const int32_t local = ids[source][slot][k];
        if (local >= 0) factor += weights[source][slot][k] * (float)(first_expert(rank) + local + 1);
      }
      for (int h = 0; h < kHidden; ++h) rows[source][slot][h] = factor * received[source][slot][h];
    }
  }

  twCombineInput_t back = TW_COMBINE_INPUT_INIT;
  back.rows = output.payloads[0];  // the same shape
  back.rows.data = rows;
  twCombineOutput_t sum = TW_COMBINE_OUTPUT_INIT;
  sum.tokens = matrix(sums, twFloat32, tokens_of(rank), kHidden);
  CHECK(twCombine(group, handle, &back, &sum));
  return total;
}

static int wrong_sums(int rank, float (*sums)[kHidden]) {
  int wrong = 0;
  for (int t = 0; t < tokens_of(rank); ++t) {
    float factor = 0;
    for (int k = 0; k < kTopK; ++k) {
      if (expert(rank, t, k) >= 0) factor += weight(k) * (float)(expert(rank, t, k) + 1);
    }
    for (int h = 0; h < kHidden; ++h) wrong += sums[t][h] != factor * value(rank, t, h);
  }
  return wrong;
}

// A call with an expert that does not exist: it is refused with a sentence, and the group stays as it was.
static int is_refused(twGroup_t group) {
  int32_t ids[1][kTopK] = {{0, kExperts}};
  const twTensor_t tensor = matrix(ids, twInt32, 1, kTopK);
  twHandle_t handle = NULL;
  const twResult_t result = twHandleCreate(&handle, group, &tensor, NULL, NULL);
  printf("refused, as it should be: %s: %s\n", twResultString(result), twLastError());
  return result == twInvalidArgument && handle == NULL;
}

static int rank_main(int rank, const char* address) {
  static float sums[kMaxTokens][kHidden];
  twCommConfig_t config = TW_COMM_CONFIG_INIT;
  config.address = address;
  twComm_t comm = NULL;
  CHECK(twCommCreateShm(&comm, rank, kRanks, &config));
  twGroup_t group = create_group(comm);

  int good = rank != 0 || is_refused(group);
  twHandle_t handle = route(group, rank);
  const int received = round_trip(group, handle, rank, sums);
  const int wrong = wrong_sums(rank, sums);
  printf("rank %d: sent %d tokens, received %d rows, %d of %d sums are wrong\n", rank, tokens_of(rank), received, wrong,
         tokens_of(rank) * kHidden);
  good = good && wrong == 0;

  CHECK(twHandleDestroy(handle));
  CHECK(twGroupDestroy(group));
  CHECK(twCommDestroy(comm));
  return good ? 0 : 1;
}

int main(void) {
  char address[64];  // the same in all ranks, unique on the host
  snprintf(address, sizeof address, "tokenway-example-%d", (int)getpid());
  for (int rank = 0; rank < kRanks; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) perror("fork");
    if (pid == 0) exit(rank_main(rank, address));
  }
  int status = 0, failed = 0, ended = 0;
  while (wait(&status) > 0) {
    ++ended;
    failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
  }
  return ended == kRanks && failed == 0 ? 0 : 1;
}
