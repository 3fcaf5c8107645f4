// Scattered sums: out[r, n] is one chain acc = acc + source[i, n], binary32 to nearest even, over the sources i that
// name row r, ascending, from +0 (or from `out`, and then rows that nobody names are left as they are); + 0 and one
// rounding at the end. f32, f16 and bf16 sources. scatter_sort.cu has put the sources in order: `keys` are their rows,
// ascending, and `sources` their numbers, ascending within a row. No chain is ever split, so no geometry changes a bit.
//
// A row that more than `few` sources name has CTAs of its own, one for WIDTH columns, which fill a ring of stages ahead
// of the additions: they come first, so that the rest of the grid (without `out` to start from, mostly zeros to be
// written) hides their time. Of the other rows one thread makes the chain of a piece of columns.
//
// Macros   OPERAND (F32 1, F16 2, BF16 3), VECTOR (1: sources are read in pieces of 16 bytes; 0: element by element,
//          any strides), THREADS, STAGES, SMEM_BYTES.
// Launch   THREADS threads, any grid (x alone): a CTA takes task blockIdx.x and every gridDim.x-th after it.
// Memory   SMEM_BYTES of dynamic shared memory: STAGES stages of 8 KiB.
// Loads    VECTOR wants the pointer and the row stride at multiples of 16 bytes and adjacent columns.
#include "parts/elements.cuh"
#include "ptx/memory.cuh"
#include "ptx/numbers.cuh"
#include "ptx/registers.cuh"

constexpr int SIZE = OPERAND == F32 ? 4 : 2;
constexpr int PIECE = VECTOR ? 16 / SIZE : 1;  // columns of a thread
constexpr int WIDTH = 128;  // as in cu/scatter_sum.py
constexpr int STAGE = 8192 / SIZE;  // elements
constexpr int LOADS = STAGE / PIECE / THREADS;
constexpr int AHEAD = 4;  // sources of a short chain that are read at once
static_assert(SMEM_BYTES == STAGES * STAGE * SIZE, "shared memory");
static_assert(LOADS * PIECE * THREADS == STAGE && WIDTH <= THREADS, "equal parts");

// cu/scatter_sum.py packs the same fields in the same order; strides are in elements, of any sign.
struct ScatterParams {
  const void* source;
  void* out;
  const uint32_t* keys;
  const uint32_t* sources;
  int64_t m, n, rows;
  int64_t source_row, source_col;
  int64_t out_row, out_col;
  int64_t few;           // a row with more sources has tasks of its own
  int64_t long_tasks;    // those of such rows, which come first
  int64_t tasks;         // in all
  int64_t units;         // of a task: rows of out, or where it accumulates places in the order of the sources
  int64_t pieces;        // columns of a task, in pieces
  int64_t column_tasks;  // tasks that one unit has
  int32_t out_dtype;     // F32, F16 or BF16
  int32_t accumulate;    // 1: the chains start at out
  int32_t out_pieces;    // 1: a piece of out can be written at once
  int32_t width;         // columns of a task of a row with many sources: a power of two, at most WIDTH, at least PIECE
};

using Element = StorageOf<OPERAND>::type;

template <int BYTES>
struct alignas(BYTES > 16 ? 16 : BYTES < 4 ? 4 : BYTES) Vector {
  uint32_t words[BYTES < 4 ? 1 : BYTES / 4];
};

// ---- where a row's sources are ------------------------------------------------------------------------------------

// The first place in [low, high) whose key is not below `wanted`, else high. All lanes of a warp call it alike.
DETKERN_INLINE int64_t warp_lower_bound(const uint32_t* keys, int64_t low, int64_t high, uint32_t wanted) {
  const int lane = thread_index() % 32;
  while (low < high) {
    const int64_t step = (high - low + 31) / 32, probe = low + lane * step;
    const bool below = probe < high && keys[probe] < wanted;
    const int count = __popc(__ballot_sync(0xffffffffu, below));
    const int64_t after = low + count * step;
    if (count == 0) return low;
    low = after - step + 1;
    high = after < high ? after : high;
  }
  return low;
}

DETKERN_INLINE int64_t lower_bound(const uint32_t* keys, int64_t low, int64_t high, uint32_t wanted) {
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (keys[middle] < wanted) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

DETKERN_INLINE bool is_long(const ScatterParams& p, int64_t first, uint32_t row) {
  return first + p.few < p.m && p.keys[first + p.few] == row;
}

// ---- elements -----------------------------------------------------------------------------------------------------

// A piece of one source, as it lies there.
struct SourcePiece {
  uint32_t words[VECTOR ? 4 : 1];

  DETKERN_INLINE void load(const ScatterParams& p, int64_t source, int64_t column) {
    const int64_t offset = source * p.source_row + column * p.source_col;
    const char* from = static_cast<const char*>(p.source) + offset * SIZE;
    if constexpr (VECTOR == 0) {
      words[0] = *reinterpret_cast<const Element*>(from);
    } else if (column + PIECE <= p.n) {
      const uint4 four = *reinterpret_cast<const uint4*>(from);
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else {  // the last piece of a line
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = 0;
#pragma unroll
      for (int i = 0; i < PIECE; ++i) {
        if (column + i < p.n) {
          if constexpr (SIZE == 4) {
            words[i] = reinterpret_cast<const uint32_t*>(from)[i];
          } else {
            words[i / 2] |= uint32_t(reinterpret_cast<const uint16_t*>(from)[i]) << 16 * (i % 2);
          }
        }
      }
    }
  }

  DETKERN_INLINE float value(int i) const {
    if constexpr (VECTOR == 0 || SIZE == 4) {
      return widened<OPERAND>(words[i]);
    } else {
      return i % 2 == 0 ? upcast_low<OPERAND>(words[i / 2]) : upcast_high<OPERAND>(words[i / 2]);
    }
  }
};

// A piece of one row of out.
class OutPiece {
 public:
  DETKERN_INLINE OutPiece(const ScatterParams& p, int64_t row, int64_t column)
      : p_(p), offset_(row * p.out_row + column * p.out_col), count_(clamp(p.n - column, PIECE)),
        whole_(p.out_pieces && count_ == PIECE) {}

  DETKERN_INLINE void start(float (&acc)[PIECE]) const {
    if (!p_.accumulate) {
#pragma unroll
      for (int i = 0; i < PIECE; ++i) acc[i] = 0.0f;
    } else if (VECTOR && whole_ && p_.out_dtype == F32) {
      using Floats = Vector<4 * PIECE>;
      const Floats vector = *reinterpret_cast<const Floats*>(static_cast<const float*>(p_.out) + offset_);
#pragma unroll
      for (int i = 0; i < PIECE; ++i) acc[i] = __uint_as_float(vector.words[i]);
    } else {
#pragma unroll
      for (int i = 0; i < PIECE; ++i)
        acc[i] = i < count_ ? load_any(p_.out, offset_ + i * p_.out_col, p_.out_dtype) : 0.0f;
    }
  }

  // A NaN becomes canonical in the addition, and in the conversions.
  DETKERN_INLINE void store(const float (&acc)[PIECE]) const {
    float values[PIECE];
#pragma unroll
    for (int i = 0; i < PIECE; ++i) values[i] = __fadd_rn(acc[i], 0.0f);
    if (p_.out_dtype == F32) {
      float* const target = static_cast<float*>(p_.out) + offset_;
      if (VECTOR && whole_) {
        Vector<4 * PIECE> vector;
#pragma unroll
        for (int i = 0; i < PIECE; ++i) vector.words[i] = __float_as_uint(values[i]);
        *reinterpret_cast<Vector<4 * PIECE>*>(target) = vector;
      } else {
#pragma unroll
        for (int i = 0; i < PIECE; ++i) {
          if (i < count_) target[i * p_.out_col] = values[i];
        }
      }
    } else if (p_.out_dtype == F16) {
      store_rounded<F16>(values);
    } else {
      store_rounded<BF16>(values);
    }
  }

 private:
  template <int DTYPE>
  DETKERN_INLINE void store_rounded(const float (&values)[PIECE]) const {
    uint16_t* const target = static_cast<uint16_t*>(p_.out) + offset_;
    if constexpr (VECTOR) {
      if (whole_) {
        Vector<2 * PIECE> vector;
#pragma unroll
        for (int i = 0; i < PIECE / 2; ++i) vector.words[i] = round_pair<DTYPE>(values[2 * i], values[2 * i + 1]);
        *reinterpret_cast<Vector<2 * PIECE>*>(target) = vector;
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
      if (i < count_) target[i * p_.out_col] = round_one<DTYPE>(values[i]);
    }
  }

  const ScatterParams& p_;
  const int64_t offset_;
  const int count_;
  const bool whole_;
};

// ---- rows with few sources ----------------------------------------------------------------------------------------

// The chain of a piece of `row`, whose sources begin at place `first`.
DETKERN_INLINE void short_chain(const ScatterParams& p, uint32_t row, int64_t first, int64_t column) {
  const OutPiece out(p, row, column);
  float acc[PIECE];
  out.start(acc);
  bool more = true;
#pragma unroll 1
  for (int64_t place = first; more; place += AHEAD) {
    uint32_t sources[AHEAD];
    bool there[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const bool inside = place + i < p.m;
      there[i] = inside && p.keys[place + i] == row;
      sources[i] = inside ? p.sources[place + i] : 0;
    }
    SourcePiece pieces[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (there[i]) pieces[i].load(p, sources[i], column);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (there[i]) {
#pragma unroll
        for (int j = 0; j < PIECE; ++j) acc[j] = __fadd_rn(acc[j], pieces[i].value(j));
      }
    }
    more = there[AHEAD - 1];
  }
  out.store(acc);
}

DETKERN_INLINE void few_sources(const ScatterParams& p, int64_t task) {
  const int64_t total = p.accumulate ? p.m : p.rows;
  const int64_t unit0 = task / p.column_tasks * p.units, piece0 = task % p.column_tasks * p.pieces;
  const int64_t all = (p.n + PIECE - 1) / PIECE - piece0;
  const int units = static_cast<int>(total - unit0 < p.units ? total - unit0 : p.units);
  const int pieces = static_cast<int>(all < p.pieces ? all : p.pieces);
  int64_t low = 0, high = 0;
  if (!p.accumulate) {
    low = warp_lower_bound(p.keys, 0, p.m, static_cast<uint32_t>(unit0));
    high = warp_lower_bound(p.keys, low, p.m, static_cast<uint32_t>(unit0 + units));
  }
  // The thread's unit and piece, and how far the next ones are.
  const int unit_step = THREADS / pieces, piece_step = THREADS % pieces;
  int unit = thread_index() / pieces, piece = thread_index() % pieces;
#pragma unroll 1
  for (; unit < units; unit += unit_step, piece += piece_step) {
    if (piece >= pieces) {
      piece -= pieces;
      ++unit;
      if (unit >= units) break;
    }
    const int64_t column = (piece0 + piece) * PIECE;
    if (p.accumulate) {
      const int64_t place = unit0 + unit;
      const uint32_t row = p.keys[place];
      if (row >= p.rows || (place > 0 && p.keys[place - 1] == row) || is_long(p, place, row)) continue;
      short_chain(p, row, place, column);
    } else {
      const uint32_t row = static_cast<uint32_t>(unit0 + unit);
      const int64_t first = low < high ? lower_bound(p.keys, low, high, row) : high;
      if (first < high && p.keys[first] == row) {
        if (!is_long(p, first, row)) short_chain(p, row, first, column);
      } else {
        const float zeros[PIECE] = {};
        OutPiece(p, row, column).store(zeros);
      }
    }
  }
}

// ---- rows with many sources ---------------------------------------------------------------------------------------

// The sources at places [first, last), WIDTH columns or fewer of them from `column0` on, through the ring.
class Ring {
 public:
  DETKERN_INLINE Ring(const ScatterParams& p, char* shared, int64_t first, int64_t last, int64_t column0)
      : p_(p), shared_(shared), first_(first), last_(last), column0_(column0), rows_(STAGE / p.width) {}

  DETKERN_INLINE int rows() const { return rows_; }
  DETKERN_INLINE int64_t stages() const { return (last_ - first_ + rows_ - 1) / rows_; }

  // The numbers of this thread's sources of a stage, before it is copied.
  DETKERN_INLINE void find(int64_t stage) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int64_t place = first_ + stage * rows_ + line(i);
      sources_[i] = place < last_ ? p_.sources[place] : 0xffffffffu;
    }
  }

  DETKERN_INLINE void copy(int slot) const {
    char* const stage = shared_ + slot * STAGE * SIZE;
    if constexpr (VECTOR) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const int64_t column = column0_ + position(i) % p_.width;
        const int bytes = sources_[i] == 0xffffffffu ? 0 : SIZE * clamp(p_.n - column, PIECE);
        const int64_t offset = bytes > 0 ? sources_[i] * p_.source_row + column : 0;
        copy_async_16(shared_address(stage) + position(i) * SIZE, static_cast<const char*>(p_.source) + offset * SIZE,
                      bytes);
      }
    } else {
      const Element* const source = static_cast<const Element*>(p_.source);
      Element values[LOADS];
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const int64_t column = column0_ + position(i) % p_.width;
        const bool there = sources_[i] != 0xffffffffu && column < p_.n;
        values[i] = there ? source[sources_[i] * p_.source_row + column * p_.source_col] : Element(0);
      }
#pragma unroll
      for (int i = 0; i < LOADS; ++i) reinterpret_cast<Element*>(stage)[position(i)] = values[i];
    }
  }

  // Adds the first `count` sources of a stage to the chain of the thread's column.
  DETKERN_INLINE void add(float& acc, int slot, int count) const {
    const Element* const stage = reinterpret_cast<const Element*>(shared_ + slot * STAGE * SIZE) + thread_index();
    const int width = p_.width;
    int row = 0;
#pragma unroll 1
    for (; row + 16 <= count; row += 16) {
      uint32_t bits[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) bits[i] = stage[(row + i) * width];
#pragma unroll
      for (int i = 0; i < 16; ++i) acc = __fadd_rn(acc, widened<OPERAND>(bits[i]));
    }
#pragma unroll 1
    for (; row < count; ++row) acc = __fadd_rn(acc, widened<OPERAND>(stage[row * width]));
  }

 private:
  // The element of a stage at which the thread's load number i begins, and its line there.
  DETKERN_INLINE int position(int i) const { return (i * THREADS + thread_index()) * PIECE; }
  DETKERN_INLINE int line(int i) const { return position(i) / p_.width; }

  const ScatterParams& p_;
  char* const shared_;
  const int64_t first_, last_, column0_;
  const int rows_;
  uint32_t sources_[LOADS];
};

DETKERN_INLINE void many_sources(const ScatterParams& p, char* shared, int64_t task) {
  // Of the places that are multiples of `few` a row with more sources has one or more: the first one's CTAs take it.
  const int64_t chunks = (p.n + p.width - 1) / p.width;
  const int64_t place = task / chunks * p.few, column0 = task % chunks * p.width;
  const uint32_t row = p.keys[place];
  if (row >= p.rows || (place > 0 && p.keys[place - p.few] == row)) return;
  const int64_t first = warp_lower_bound(p.keys, place > p.few ? place - p.few : 0, place, row);
  if (!is_long(p, first, row)) return;
  const int64_t last = warp_lower_bound(p.keys, first + p.few, p.m, row + 1);

  Ring ring(p, shared, first, last, column0);
  const int64_t column = column0 + thread_index();
  const bool adds = thread_index() < p.width && column < p.n;
  float acc = adds && p.accumulate ? load_any(p.out, row * p.out_row + column * p.out_col, p.out_dtype) : 0.0f;
  const int64_t stages = ring.stages();
  int loaded = 0, added = 0;  // slots of the ring
  __syncthreads();            // an earlier task's last stage is added
  ring.find(0);
  // The first rounds, in which nothing is added, fill the ring.
  for (int64_t next = 0; next < stages + STAGES - 1; ++next) {
    const int64_t stage = next - (STAGES - 1);
    if constexpr (VECTOR) copy_async_wait<STAGES - 2>();
    __syncthreads();  // `stage` is in place, and the one before it is added
    if (next < stages) {
      ring.copy(loaded);
      ring.find(next + 1);
    }
    if constexpr (VECTOR) copy_async_commit();
    loaded = loaded + 1 == STAGES ? 0 : loaded + 1;
    if (stage >= 0) {
      if (adds) ring.add(acc, added, clamp(last - first - stage * ring.rows(), ring.rows()));
      added = added + 1 == STAGES ? 0 : added + 1;
    }
  }
  if (!adds) return;
  const float value = __fadd_rn(acc, 0.0f);
  const int64_t offset = row * p.out_row + column * p.out_col;
  if (p.out_dtype == F32) {
    static_cast<float*>(p.out)[offset] = value;
  } else {
    static_cast<uint16_t*>(p.out)[offset] = p.out_dtype == F16 ? round_one<F16>(value) : round_one<BF16>(value);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) detkern_kernel(const __grid_constant__ ScatterParams p) {
  extern __shared__ __align__(16) char shared[];
  for (int64_t task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    if (task < p.long_tasks) {
      many_sources(p, shared, task);
    } else {
      few_sources(p, task - p.long_tasks);
    }
  }
}
