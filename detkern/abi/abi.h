/* The C ABI between detkern and its shared libraries: the CPU's (cpu/), MUSA's and Ascend's (npu/).
 *
 * A library exports every function at the end. detkern_offers says what it computes; detkern_run computes it. Strides
 * are in elements of the operand's own type and may be zero or negative; pointers give element [0, ..., 0] and may have
 * any alignment. abi/mirror.py repeats these types in ctypes.
 *
 * The ABI grows without a new version: a library and a detkern of different age serve each other with what both have.
 * - A new operation is a new code of detkern_operation with a descriptor of its own; a new contract, kind of rows or
 *   type is a new code. A library does not list a code that it does not know, and answers it with DETKERN_UNSUPPORTED.
 * - A struct that begins with `size` grows by fields at its end. Zero in a new field means what was so without it. The
 *   caller sets `size` to that of its own struct, which is at least that of version 3. A library that knows more fields
 *   takes the missing ones as zero. One that knows fewer takes the descriptor where the others are zero, else answers
 *   DETKERN_UNSUPPORTED; it fills in what it knows. abi/checks.h does this for every library.
 * - Codes and fields are neither removed nor given another meaning.
 * The version rises where that cannot be kept, where a function below changes, and where detkern needs a new one.
 * Version 2 had a function for each operation and descriptors of one size; abi/version2.py calls its libraries. */
#ifndef DETKERN_ABI_H
#define DETKERN_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DETKERN_ABI_VERSION 3
#define DETKERN_MAX_BATCH_RANK 8
#define DETKERN_MAX_SUM_RANK 62 /* more dimensions of two or more would be 2^63 rows */
#define DETKERN_EXPORT __attribute__((visibility("default")))

enum detkern_dtype {
  DETKERN_F32 = 1,
  DETKERN_F16 = 2,
  DETKERN_BF16 = 3,
  DETKERN_E4M3 = 4,
  DETKERN_E5M2 = 5,
};

enum detkern_contract {
  DETKERN_FMA = 1,
  DETKERN_MMA16 = 2,
  DETKERN_MMA8 = 3,
  DETKERN_TREE = 4,
  DETKERN_TREE_MMA16 = 5,
  DETKERN_FP8_BLOCK128 = 6,
};

/* What detkern_run computes, each with its descriptor below. */
enum detkern_operation {
  DETKERN_OPERATION_GEMM = 1,              /* detkern_gemm_descriptor */
  DETKERN_OPERATION_BLOCK_SCALED_GEMM = 2, /* detkern_block_scaled_descriptor */
  DETKERN_OPERATION_BIAS_GRADIENT = 3,     /* detkern_column_sum_descriptor */
  DETKERN_OPERATION_ROWS = 4,              /* detkern_row_descriptor */
  DETKERN_OPERATION_LINEAR_LOGP = 5,              /* detkern_logp_descriptor: rows of logits folded into states */
  DETKERN_OPERATION_LINEAR_LOGP_DELTA = 6,        /* detkern_logp_descriptor: the gradient of logits */
};

/* The row operations; up to 10 a backward one is its forward's value plus 5. */
enum detkern_row_kind {
  DETKERN_ROW_SUM = 1,
  DETKERN_ROW_MEAN = 2,
  DETKERN_ROW_MEAN_SQUARE = 3,
  DETKERN_ROW_SOFTMAX = 4,
  DETKERN_ROW_LOG_SOFTMAX = 5,
  DETKERN_ROW_SUM_BACKWARD = 6,
  DETKERN_ROW_MEAN_BACKWARD = 7,
  DETKERN_ROW_MEAN_SQUARE_BACKWARD = 8,
  DETKERN_ROW_SOFTMAX_BACKWARD = 9,
  DETKERN_ROW_LOG_SOFTMAX_BACKWARD = 10,
  DETKERN_ROW_CUMSUM = 11,
  DETKERN_ROW_CUMSUM_BACKWARD = 12,
};

enum detkern_status {
  DETKERN_OK = 0,
  DETKERN_INVALID = 1,      /* a descriptor that the library does not understand */
  DETKERN_UNSUPPORTED = 2,  /* a contract, type or size that it does not offer */
  DETKERN_OUT_OF_MEMORY = 3,
  DETKERN_DEVICE_FAULT = 4,
};

enum detkern_copy_direction {
  DETKERN_TO_DEVICE = 1,
  DETKERN_TO_HOST = 2,
};

/* What the library is. */
typedef struct {
  uint64_t size;
  int32_t abi_version;
  int32_t host_memory; /* 1 where the pointers are host pointers */
  char name[64];       /* backend and build, for people */
} detkern_capabilities;

/* One thing that the library computes. This struct never changes. */
typedef struct {
  uint32_t operation; /* detkern_operation */
  uint32_t variant;   /* of products and of logits the contract, of row operations the kind, else 0 */
  uint64_t dtypes;    /* bit d is set where operands may have type d */
} detkern_offer;

/* One device that the library sees; `size` and `index` are the caller's, the rest is filled in. */
typedef struct {
  uint64_t size;
  int32_t index;
  int32_t units;   /* multiprocessors, vector cores or CPU threads */
  char name[128];  /* the device, for people */
  char driver[64]; /* versions of driver and runtime; a self-check holds for one device and driver */
} detkern_device;

/* out[batch, m, n] = contract(a[batch, m, k], b[batch, k, n]) (+ out) (+ bias[n]) */
typedef struct {
  uint64_t size;
  int32_t contract;
  int32_t operand_dtype;
  int32_t out_dtype;
  int32_t bias_dtype; /* 0: no bias */
  int32_t accumulate; /* 1: the chain starts at out (f32), or a tree's root is added to it */
  int32_t batch_rank;
  int32_t device;
  int32_t threads; /* CPU libraries: at most this many; 0: one */
  int64_t m, n, k;
  int64_t batch_shape[DETKERN_MAX_BATCH_RANK];
  int64_t a_batch_strides[DETKERN_MAX_BATCH_RANK];
  int64_t b_batch_strides[DETKERN_MAX_BATCH_RANK];
  int64_t out_batch_strides[DETKERN_MAX_BATCH_RANK];
  int64_t a_row_stride, a_col_stride;
  int64_t b_row_stride, b_col_stride;
  int64_t out_row_stride, out_col_stride;
  int64_t bias_stride;
  const void *a, *b;
  void *out;
  const void *bias;
  void *stream;
  void *scratch; /* detkern_scratch's bytes at a multiple of 256, until the stream's work so far has finished */
  uint64_t scratch_bytes;
} detkern_gemm_descriptor;

/* out[m, n] = chain over blocks of 128 k of fma(scale_a[m, block] * scale_b[block, n], block product, acc) */
typedef struct {
  uint64_t size;
  int32_t a_dtype, b_dtype; /* DETKERN_E4M3 or DETKERN_E5M2, in any pairing; the scales are f32 */
  int32_t out_dtype;
  int32_t accumulate;
  int32_t device;
  int32_t threads;
  int64_t m, n, k;
  int64_t a_row_stride, a_col_stride;
  int64_t scale_a_row_stride, scale_a_col_stride;
  int64_t b_row_stride, b_col_stride;
  int64_t scale_b_row_stride, scale_b_col_stride;
  int64_t out_row_stride, out_col_stride;
  const void *a, *scale_a, *b, *scale_b;
  void *out;
  void *stream;
} detkern_block_scaled_descriptor;

/* out[n] = the chain of binary32 additions over the rows dc[batch, m, n], in row-major order of (batch, m), from +0 or
 * out */
typedef struct {
  uint64_t size;
  int32_t operand_dtype; /* f32, f16 or bf16 */
  int32_t out_dtype;
  int32_t accumulate; /* 1: the chain starts at out (f32) */
  int32_t batch_rank;
  int32_t device;
  int32_t threads;
  int64_t m, n;
  int64_t batch_shape[DETKERN_MAX_SUM_RANK];
  int64_t batch_strides[DETKERN_MAX_SUM_RANK];
  int64_t row_stride, col_stride;
  int64_t out_stride;
  const void *dc;
  void *out;
  void *stream;
} detkern_column_sum_descriptor;

/* out[batch, m, :] = the row operation on a[batch, m, :] (and b[batch, m, :]) over n columns. The kinds with two
 * operands are mean_square_backward, softmax_backward and log_softmax_backward. One number a row, whose col_stride is
 * not read: out of sum, mean and mean_square, a of their backward kinds. */
typedef struct {
  uint64_t size;
  int32_t kind; /* detkern_row_kind */
  int32_t a_dtype, b_dtype, out_dtype; /* f32, f16 or bf16; b_dtype 0: one operand */
  int32_t batch_rank;
  int32_t device;
  int32_t threads;
  int32_t unused;
  int64_t m, n;
  int64_t batch_shape[DETKERN_MAX_SUM_RANK];
  int64_t a_batch_strides[DETKERN_MAX_SUM_RANK];
  int64_t b_batch_strides[DETKERN_MAX_SUM_RANK];
  int64_t out_batch_strides[DETKERN_MAX_SUM_RANK];
  int64_t a_row_stride, a_col_stride;
  int64_t b_row_stride, b_col_stride;
  int64_t out_row_stride, out_col_stride;
  const void *a, *b;
  void *out;
  void *stream;
} detkern_row_descriptor;

/* linear_logp of docs/contracts.md over rows `start` to start + n of the weight of a vocabulary. logits =
 * contract(hidden[m, k], weight[n, k]) + bias[n]. LINEAR_LOGP: state[0:3, m] = (m, s, w), the state of these columns,
 * which are whole parts of the vocabulary; state[3 + i, m] = the logit of target i, -inf where it is not among them.
 * LINEAR_LOGP_DELTA: out[m, n] = the gradient of the logits from state[0:3, m], of the whole vocabulary, and
 * grads[targets + 1 + entropy, m]. States and grads are f32. */
typedef struct {
  uint64_t size;
  int32_t contract;
  int32_t operand_dtype;
  int32_t out_dtype;  /* of a gradient */
  int32_t bias_dtype; /* 0: no bias */
  int32_t target_size; /* 4 or 8: int32 or int64 */
  int32_t targets;     /* of a row */
  int32_t entropy;     /* 1: w is computed, or grads have a line for the entropy; else w is +0 */
  int32_t dense;       /* bit 0: state's lines are m numbers apart (its line stride is not read); bit 1: of grads */
  int32_t device;
  int32_t threads;
  float tau, cap, inverse; /* 1 / temperature, the softcap and its inverse; 0: no such step */
  int32_t unused;
  int64_t m, n, k;
  int64_t vocabulary, start, ignore_index;
  int64_t hidden_row_stride, hidden_col_stride;
  int64_t weight_row_stride, weight_col_stride;
  int64_t target_row_stride, target_col_stride;
  int64_t state_line_stride, state_row_stride;
  int64_t grads_line_stride, grads_row_stride;
  int64_t out_row_stride, out_col_stride;
  int64_t bias_stride;
  const void *hidden, *weight, *target, *bias, *grads;
  void *state;
  void *out;
  void *stream;
} detkern_logp_descriptor;

/* Every function returns a detkern_status, detkern_abi_version and detkern_last_error aside. The last error is the
 * calling thread's, valid until its next call. */
DETKERN_EXPORT int32_t detkern_abi_version(void);
DETKERN_EXPORT const char *detkern_last_error(void);
DETKERN_EXPORT int32_t detkern_get_capabilities(detkern_capabilities *capabilities);
/* Writes the first `capacity` offers and the number of all. */
DETKERN_EXPORT int32_t detkern_offers(detkern_offer *offers, uint64_t capacity, uint64_t *count);
/* Computes an operation, or enqueues it on the descriptor's stream. */
DETKERN_EXPORT int32_t detkern_run(uint32_t operation, const void *descriptor);
/* The bytes of scratch memory that detkern_run needs for a descriptor, whose pointers are not read; 0 where it has no
 * field for it. */
DETKERN_EXPORT int32_t detkern_scratch(uint32_t operation, const void *descriptor, uint64_t *bytes);
/* Devices and their memory, for callers that have no framework at hand; detkern_copy waits for all work on the device
 * first and for the copy afterwards. Memory of the host is memory of the device where host_memory is 1. */
DETKERN_EXPORT int32_t detkern_device_count(int32_t *count);
DETKERN_EXPORT int32_t detkern_get_device(detkern_device *device);
DETKERN_EXPORT int32_t detkern_allocate(int32_t device, uint64_t bytes, void **pointer);
DETKERN_EXPORT int32_t detkern_free(int32_t device, void *pointer);
DETKERN_EXPORT int32_t detkern_copy(int32_t device, void *to, const void *from, uint64_t bytes, int32_t direction);

#ifdef __cplusplus
}
#endif
#endif
