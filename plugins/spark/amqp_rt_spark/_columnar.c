/* Decode encoded messages of AMQP 1.0 into the buffers of Arrow columns.

The columns are defined by rows.py and variant.py, and this file is a faster way to the same result. It
decodes well-formed, usual messages, and returns every other one to its caller as "odd": malformed octets,
descriptors that are symbols, arrays, described values, maps with keys that are not text, deep nesting. The
caller makes those rows with rows.py, so that errors, their texts and rare types are implemented once. The
results here must therefore equal those of rows.py, and any doubt is "odd".

Sections and their sizes are those of Part 3 section 3.2, constructors those of Part 1 section 1.6, and VARIANT
is that of Parquet. No octet is read before the distance to the end of the payload has been checked. A row
that turns out to be odd leaves no trace, because columns are written at the number of the row, and the
number is incremented at the end.

Only the limited API of Python 3.11 is used, so one build serves all later versions. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Outcome of a step. ODD is not an error: the caller makes the row. RAISED has set a Python exception. */
typedef enum { OK, ODD, RAISED } Outcome;

#define TRY(step)                                                                                  \
    do {                                                                                           \
        Outcome outcome_ = (step);                                                                 \
        if (outcome_ != OK) return outcome_;                                                       \
    } while (0)

/* Bounds, all of them lower than those of the codec in Python, so that a message beyond them is "odd" here and
   checked there. Names are compared one by one, hence few. */
enum {
    NAMES_MAX = 64,
    ELEMENTS_MAX = 1024,
    DEPTH_MAX = 16,
    SECTIONS_MAX = 64,
    HIDDEN_MAX = 16,
    ROWS_MAX = 1 << 20,
};

/* --- Growing octets ----------------------------------------------------------------------------- */

typedef struct {
    uint8_t *octets;
    size_t size, room;
} Buffer;

/* Arrow's offsets have 32 bits, so no buffer may grow beyond their range. */
static Outcome reserve(Buffer *buffer, size_t more) {
    if (more <= buffer->room - buffer->size) return OK;
    if (more > (size_t)INT32_MAX - buffer->size) return ODD;
    size_t room = buffer->room * 2;
    if (room < buffer->size + more) room = buffer->size + more;
    if (room < 256) room = 256;
    /* The first check above relies on this. */
    if (room > INT32_MAX) room = INT32_MAX;
    uint8_t *octets = PyMem_Realloc(buffer->octets, room);
    if (octets == NULL) {
        PyErr_NoMemory();
        return RAISED;
    }
    buffer->octets = octets;
    buffer->room = room;
    return OK;
}

static Outcome append(Buffer *buffer, const void *octets, size_t size) {
    TRY(reserve(buffer, size));
    if (size) memcpy(buffer->octets + buffer->size, octets, size);
    buffer->size += size;
    return OK;
}

/* Write a number where room has been reserved. */
static inline void put_little(Buffer *buffer, uint64_t number, int width) {
    uint8_t *at = buffer->octets + buffer->size;
    for (int i = 0; i < width; i++) at[i] = (uint8_t)(number >> (8 * i));
    buffer->size += (size_t)width;
}

static Outcome append_little(Buffer *buffer, uint64_t number, int width) {
    TRY(reserve(buffer, (size_t)width));
    put_little(buffer, number, width);
    return OK;
}

/* --- Reading octets ------------------------------------------------------------------------------ */

typedef struct {
    const uint8_t *at, *end;
} Cursor;

static size_t left(const Cursor *cursor) { return (size_t)(cursor->end - cursor->at); }

static uint64_t big(const uint8_t *at, int width) {
    uint64_t number = 0;
    for (int i = 0; i < width; i++) number = number << 8 | at[i];
    return number;
}

/* Read a size or count of *width* octets. */
static Outcome take_number(Cursor *cursor, int width, uint64_t *number) {
    if (left(cursor) < (size_t)width) return ODD;
    *number = big(cursor->at, width);
    cursor->at += width;
    return OK;
}

static Outcome take_octets(Cursor *cursor, uint64_t size, Cursor *content) {
    if (left(cursor) < size) return ODD;
    content->at = cursor->at;
    content->end = cursor->at + size;
    cursor->at += size;
    return OK;
}

static Outcome take_sized(Cursor *cursor, int width, Cursor *content) {
    uint64_t size;
    TRY(take_number(cursor, width, &size));
    return take_octets(cursor, size, content);
}

static int is_ascii(Cursor text) {
    uint64_t word;
    while (left(&text) >= 8) {
        memcpy(&word, text.at, 8);
        if (word & UINT64_C(0x8080808080808080)) return 0;
        text.at += 8;
    }
    while (text.at < text.end)
        if (*text.at++ & 0x80) return 0;
    return 1;
}

/* UTF-8 as accepted by Python's strict decoder: shortest forms, no surrogates, nothing above U+10FFFF. */
static int is_utf8(Cursor text) {
    if (is_ascii(text)) return 1;
    while (text.at < text.end) {
        uint8_t first = *text.at++;
        uint8_t low = 0x80, high = 0xBF;
        int more;
        if (first < 0x80) continue;
        if (first < 0xC2) return 0;
        if (first < 0xE0) more = 1;
        else if (first < 0xF0) {
            more = 2;
            if (first == 0xE0) low = 0xA0;
            if (first == 0xED) high = 0x9F;
        } else if (first < 0xF5) {
            more = 3;
            if (first == 0xF0) low = 0x90;
            if (first == 0xF4) high = 0x8F;
        } else return 0;
        if (left(&text) < (size_t)more) return 0;
        for (; more; more--, low = 0x80, high = 0xBF) {
            if (*text.at < low || *text.at > high) return 0;
            text.at++;
        }
    }
    return 1;
}

/* Read and check a text: a symbol, or also a string if *strings*. */
static Outcome take_text(Cursor *cursor, int strings, Cursor *text) {
    if (cursor->at == cursor->end) return ODD;
    uint8_t code = *cursor->at++;
    if (code == 0xA3 || code == 0xB3) {
        TRY(take_sized(cursor, code == 0xA3 ? 1 : 4, text));
        return is_ascii(*text) ? OK : ODD;
    }
    if (strings && (code == 0xA1 || code == 0xB1)) {
        TRY(take_sized(cursor, code == 0xA1 ? 1 : 4, text));
        return is_utf8(*text) ? OK : ODD;
    }
    return ODD;
}

/* Open a list or map whose constructor has been read: its elements and their count. */
static Outcome take_compound(Cursor *cursor, uint8_t code, Cursor *content, uint64_t *count) {
    int width = code & 0x10 ? 4 : 1;
    TRY(take_sized(cursor, width, content));
    TRY(take_number(content, width, count));
    /* Every element has a constructor of at least one octet, so a larger count is invalid. */
    return *count <= left(content) ? OK : ODD;
}

static int is_same(Cursor one, const uint8_t *octets, size_t size) {
    return left(&one) == size && memcmp(one.at, octets, size) == 0;
}

/* --- VARIANT ------------------------------------------------------------------------------------- */

/* Tags of VARIANT: primitives are shifted left by two, and the kind of the value is in these two bits. */
enum { PRIMITIVE, SHORT_STRING, OBJECT, ARRAY };
enum {
    V_NULL = 0, V_TRUE = 1, V_FALSE = 2, V_INT8 = 3, V_INT16 = 4, V_INT32 = 5, V_INT64 = 6, V_DOUBLE = 7,
    V_DECIMAL16 = 10, V_TIMESTAMP = 12, V_FLOAT = 14, V_BINARY = 15, V_STRING = 16, V_UUID = 20,
};

typedef struct {
    size_t at, size;
    int rank;
} Part;

/* Workspace of one value, which is read twice: first to collect all names and check everything, since the
   numbers of names depend on all of them; then to write the value. */
typedef struct {
    Cursor names[NAMES_MAX];
    int name_count;
    /* Names in the order of their octets, and the rank of each name. */
    uint8_t order[NAMES_MAX], rank[NAMES_MAX];
    /* Name of each map entry, in the order of the entries; HIDDEN if it is left out. */
    uint8_t keys[ELEMENTS_MAX];
    int key_count, key_next;
    int elements;
    Part parts[ELEMENTS_MAX];
    int part_count;
    Buffer stack;
} Variant;

enum { HIDDEN = 0xFF };

static int width_of(uint64_t number) {
    int width = 1;
    while (number >>= 8) width++;
    return width;
}

static Outcome tagged(Buffer *out, int kind, uint64_t number, int width) {
    TRY(reserve(out, (size_t)width + 1));
    put_little(out, (uint64_t)kind << 2, 1);
    put_little(out, number, width);
    return OK;
}

static Outcome write_text(Buffer *out, Cursor text) {
    size_t size = left(&text);
    if (size < 64) TRY(append_little(out, size << 2 | SHORT_STRING, 1));
    else TRY(tagged(out, V_STRING, size, 4));
    return append(out, text.at, size);
}

static Outcome write_octets(Buffer *out, const uint8_t *octets, size_t size) {
    TRY(tagged(out, V_BINARY, size, 4));
    return append(out, octets, size);
}

/* Read a scalar whose constructor has been read. Written to *out*, unless that is NULL. */
static Outcome scalar(Cursor *cursor, uint8_t code, Buffer *out) {
    Buffer nowhere = {NULL, 0, 0};
    int judge = out == NULL;
    if (judge) out = &nowhere;
#define WRITE(step) return judge ? OK : (step)
    if (code == 0xA0 || code == 0xB0) {
        Cursor octets;
        TRY(take_sized(cursor, code == 0xA0 ? 1 : 4, &octets));
        WRITE(write_octets(out, octets.at, left(&octets)));
    }
    if (code == 0xA1 || code == 0xB1 || code == 0xA3 || code == 0xB3) {
        Cursor text;
        cursor->at--;
        TRY(take_text(cursor, 1, &text));
        WRITE(write_text(out, text));
    }
    int width;
    switch (code >> 4) {
    case 0x4: width = 0; break;
    case 0x5: width = 1; break;
    case 0x6: width = 2; break;
    case 0x7: width = 4; break;
    case 0x8: width = 8; break;
    case 0x9: width = 16; break;
    default: return ODD;
    }
    if (left(cursor) < (size_t)width) return ODD;
    const uint8_t *at = cursor->at;
    cursor->at += width;
    uint64_t number = width <= 8 ? big(at, width) : 0;
    switch (code) {
    case 0x40: WRITE(tagged(out, V_NULL, 0, 0));
    case 0x41: WRITE(tagged(out, V_TRUE, 0, 0));
    case 0x42: WRITE(tagged(out, V_FALSE, 0, 0));
    case 0x56: /* boolean */
        if (number > 1) return ODD;
        WRITE(tagged(out, number ? V_TRUE : V_FALSE, 0, 0));
    case 0x51: WRITE(tagged(out, V_INT8, number, 1));   /* byte */
    case 0x50: WRITE(tagged(out, V_INT16, number, 2));  /* ubyte */
    case 0x61: WRITE(tagged(out, V_INT16, number, 2));  /* short */
    case 0x60: WRITE(tagged(out, V_INT32, number, 4));  /* ushort */
    case 0x71: WRITE(tagged(out, V_INT32, number, 4));  /* int */
    case 0x54: WRITE(tagged(out, V_INT32, (uint64_t)(int64_t)(int8_t)number, 4)); /* smallint */
    case 0x55: WRITE(tagged(out, V_INT64, (uint64_t)(int64_t)(int8_t)number, 8)); /* smalllong */
    case 0x43: case 0x52: case 0x70: /* uint */
    case 0x44: case 0x53: /* ulong */
    case 0x81: /* long */
        WRITE(tagged(out, V_INT64, number, 8));
    case 0x80: /* ulong */
        if (number <= INT64_MAX) WRITE(tagged(out, V_INT64, number, 8));
        if (judge) return OK;
        TRY(tagged(out, V_DECIMAL16, 0, 1)); /* no digits after the point */
        TRY(append_little(out, number, 8));
        return append_little(out, 0, 8);
    case 0x72: WRITE(tagged(out, V_FLOAT, number, 4));
    case 0x82: WRITE(tagged(out, V_DOUBLE, number, 8));
    case 0x83: { /* timestamp, in milliseconds; clamped to the range of microseconds */
        int64_t moment = (int64_t)number;
        if (moment > INT64_MAX / 1000) moment = INT64_MAX;
        else if (moment < INT64_MIN / 1000) moment = INT64_MIN;
        else moment *= 1000;
        WRITE(tagged(out, V_TIMESTAMP, (uint64_t)moment, 8));
    }
    case 0x74: case 0x84: case 0x94: /* decimals */
        WRITE(write_octets(out, at, (size_t)width));
    case 0x98: /* uuid */
        if (judge) return OK;
        TRY(tagged(out, V_UUID, 0, 0));
        return append(out, at, 16);
    default: return ODD; /* char, and unassigned constructors */
    }
#undef WRITE
}

static Outcome find_name(Variant *v, Cursor name, uint8_t *found) {
    for (int i = 0; i < v->name_count; i++)
        if (is_same(v->names[i], name.at, left(&name))) {
            *found = (uint8_t)i;
            return OK;
        }
    if (v->name_count == NAMES_MAX) return ODD;
    v->names[v->name_count] = name;
    *found = (uint8_t)v->name_count++;
    return OK;
}

static Outcome gather(Variant *v, Cursor *cursor, int depth);

/* Take *count* elements out of the budget. */
static Outcome spend(Variant *v, uint64_t count) {
    if (count > (uint64_t)(ELEMENTS_MAX - v->elements)) return ODD;
    v->elements += (int)count;
    return OK;
}

static Outcome gather_entry(Variant *v, Cursor *content, Cursor name, uint64_t *seen, int depth) {
    uint8_t key;
    TRY(find_name(v, name, &key));
    if (*seen >> key & 1) return ODD; /* duplicate name */
    *seen |= UINT64_C(1) << key;
    v->keys[v->key_count++] = key;
    return gather(v, content, depth);
}

/* Collect the names in one value, and check it. */
static Outcome gather(Variant *v, Cursor *cursor, int depth) {
    if (cursor->at == cursor->end) return ODD;
    uint8_t code = *cursor->at++;
    Cursor content;
    uint64_t count;
    switch (code) {
    case 0x45: return OK;
    case 0xC0: case 0xD0:
        if (depth == DEPTH_MAX) return ODD;
        TRY(take_compound(cursor, code, &content, &count));
        TRY(spend(v, count));
        while (count--) TRY(gather(v, &content, depth + 1));
        break;
    case 0xC1: case 0xD1: {
        uint64_t seen = 0;
        if (depth == DEPTH_MAX) return ODD;
        TRY(take_compound(cursor, code, &content, &count));
        if (count & 1) return ODD;
        TRY(spend(v, count));
        for (; count; count -= 2) {
            Cursor name;
            TRY(take_text(&content, 1, &name));
            TRY(gather_entry(v, &content, name, &seen, depth + 1));
        }
        break;
    }
    default: return scalar(cursor, code, NULL);
    }
    return content.at == content.end ? OK : ODD;
}

/* Number the names by the order of their octets. */
static void rank_names(Variant *v) {
    for (int i = 0; i < v->name_count; i++) {
        Cursor name = v->names[i];
        size_t size = left(&name);
        int place = i;
        for (; place; place--) {
            Cursor other = v->names[v->order[place - 1]];
            size_t common = left(&other) < size ? left(&other) : size;
            int compared = memcmp(other.at, name.at, common);
            if (compared < 0 || (compared == 0 && left(&other) < size)) break;
            v->order[place] = v->order[place - 1];
        }
        v->order[place] = (uint8_t)i;
    }
    for (int i = 0; i < v->name_count; i++) v->rank[v->order[i]] = (uint8_t)i;
}

static Outcome write_metadata(const Variant *v, Buffer *out) {
    uint64_t total = 0, most;
    for (int i = 0; i < v->name_count; i++) total += left(&v->names[i]);
    most = total > (uint64_t)v->name_count ? total : (uint64_t)v->name_count;
    if (most > INT32_MAX) return ODD;
    int width = width_of(most);
    /* Version 1, names in order, and the width of their offsets. */
    TRY(append_little(out, (uint64_t)(1 | 0x10 | (width - 1) << 6), 1));
    TRY(append_little(out, (uint64_t)v->name_count, width));
    uint64_t at = 0;
    for (int i = 0; i < v->name_count; i++) {
        TRY(append_little(out, at, width));
        at += left(&v->names[v->order[i]]);
    }
    TRY(append_little(out, at, width));
    for (int i = 0; i < v->name_count; i++) {
        Cursor name = v->names[v->order[i]];
        TRY(append(out, name.at, left(&name)));
    }
    return OK;
}

/* Replace the parts from *first* on, whose octets are on the stack from *base* on, by an object or array. */
static Outcome join(Variant *v, int kind, int first, size_t base) {
    Part *parts = v->parts + first;
    int count = v->part_count - first;
    uint64_t total = v->stack.size - base;
    int width = width_of(total);
    int large = count > 0xFF;
    int id_width = width_of(v->name_count ? (uint64_t)v->name_count - 1 : 0);
    int header = width - 1;
    if (kind == ARRAY) header |= large << 2;
    else header |= (id_width - 1) << 2 | large << 4;
    if (kind == OBJECT)
        for (int i = 1; i < count; i++) {
            Part part = parts[i];
            int place = i;
            for (; place && parts[place - 1].rank > part.rank; place--) parts[place] = parts[place - 1];
            parts[place] = part;
        }
    size_t begin = v->stack.size;
    /* Header, count, ids of names, one offset more than there are parts, and the parts. */
    TRY(reserve(&v->stack, 5 + (size_t)count * (size_t)(id_width + width) + (size_t)width + total));
    put_little(&v->stack, (uint64_t)(header << 2 | kind), 1);
    put_little(&v->stack, (uint64_t)count, large ? 4 : 1);
    if (kind == OBJECT)
        for (int i = 0; i < count; i++) put_little(&v->stack, (uint64_t)parts[i].rank, id_width);
    uint64_t at = 0;
    for (int i = 0; i < count; i++) {
        put_little(&v->stack, at, width);
        at += parts[i].size;
    }
    put_little(&v->stack, at, width);
    for (int i = 0; i < count; i++) {
        if (parts[i].size)
            memcpy(v->stack.octets + v->stack.size, v->stack.octets + parts[i].at, parts[i].size);
        v->stack.size += parts[i].size;
    }
    size_t size = v->stack.size - begin;
    memmove(v->stack.octets + base, v->stack.octets + begin, size);
    v->stack.size = base + size;
    v->part_count = first;
    return OK;
}

static Outcome write_value(Variant *v, Cursor *cursor);

static Outcome write_part(Variant *v, Cursor *cursor, int first, int index, int rank) {
    size_t at = v->stack.size;
    TRY(write_value(v, cursor));
    v->parts[first + index].at = at;
    v->parts[first + index].size = v->stack.size - at;
    v->parts[first + index].rank = rank;
    return OK;
}

/* Append one value, which *gather* has checked, to the stack. */
static Outcome write_value(Variant *v, Cursor *cursor) {
    uint8_t code = *cursor->at++;
    int is_list = code == 0xC0 || code == 0xD0;
    if (code != 0x45 && !is_list && code != 0xC1 && code != 0xD1)
        return scalar(cursor, code, &v->stack);
    int first = v->part_count;
    size_t base = v->stack.size;
    if (code == 0x45) return join(v, ARRAY, first, base);
    Cursor content;
    uint64_t count;
    TRY(take_compound(cursor, code, &content, &count));
    if (is_list) {
        v->part_count += (int)count;
        for (int i = 0; i < (int)count; i++) TRY(write_part(v, &content, first, i, 0));
        return join(v, ARRAY, first, base);
    }
    int entries = 0;
    v->part_count += (int)(count / 2);
    for (; count; count -= 2) {
        Cursor name;
        uint8_t key = v->keys[v->key_next++];
        TRY(take_text(&content, 1, &name));
        if (key == HIDDEN) TRY(scalar(&content, *content.at++, NULL));
        else TRY(write_part(v, &content, first, entries++, v->rank[key]));
    }
    v->part_count = first + entries;
    return join(v, OBJECT, first, base);
}

static void begin_value(Variant *v) {
    v->name_count = v->key_count = v->key_next = v->elements = v->part_count = 0;
    v->stack.size = 0;
}

/* Names of the last value of a column, in order of appearance, with their ranks and metadata, to be reused:
   values of one application have the same names. */
typedef struct {
    int count;
    size_t sizes[NAMES_MAX];
    Buffer octets, metadata;
    uint8_t rank[NAMES_MAX];
} Shape;

static int has_shape(const Variant *v, const Shape *shape) {
    if (shape->metadata.size == 0 || shape->count != v->name_count) return 0;
    size_t at = 0;
    for (int i = 0; i < v->name_count; i++) {
        if (left(&v->names[i]) != shape->sizes[i]) return 0;
        if (shape->sizes[i] && memcmp(v->names[i].at, shape->octets.octets + at, shape->sizes[i]) != 0)
            return 0;
        at += shape->sizes[i];
    }
    return 1;
}

static Outcome find_shape(Variant *v, Shape *shape) {
    if (has_shape(v, shape)) {
        memcpy(v->rank, shape->rank, sizeof v->rank);
        return OK;
    }
    /* Invalid until it is complete. */
    shape->metadata.size = shape->octets.size = 0;
    rank_names(v);
    for (int i = 0; i < v->name_count; i++) {
        shape->sizes[i] = left(&v->names[i]);
        TRY(append(&shape->octets, v->names[i].at, shape->sizes[i]));
    }
    shape->count = v->name_count;
    memcpy(shape->rank, v->rank, sizeof v->rank);
    Outcome outcome = write_metadata(v, &shape->metadata);
    if (outcome != OK) shape->metadata.size = 0;
    return outcome;
}

/* Write the value that *gather* has checked to two buffers. */
static Outcome finish_value(Variant *v, Cursor content, Shape *shape, Buffer *value, Buffer *metadata) {
    TRY(find_shape(v, shape));
    TRY(write_value(v, &content));
    TRY(append(value, v->stack.octets, v->stack.size));
    return append(metadata, shape->metadata.octets, shape->metadata.size);
}

/* --- Columns --------------------------------------------------------------------------------------- */

enum {
    ADDRESS, PARTITION, OFFSET, ENQUEUED_TIME, BODY, BODY_KIND, BODY_VARIANT, HEADER, PROPERTIES,
    APPLICATION_PROPERTIES, MESSAGE_ANNOTATIONS, MESSAGE, COLUMNS,
};
static const char *const NAMES[COLUMNS] = {
    "address", "partition", "offset", "enqueued_time", "body", "body_kind", "body_variant", "header",
    "properties", "application_properties", "message_annotations", "message",
};

/* Types of Arrow arrays: b is a bit, i 32 bits, l 64 bits, s a string or binary. */
static const char *const LAYOUTS[COLUMNS] = {
    "s", "i", "l", "l", "s", "s", "ss", "bilbl",
    "sss" "sss" "ss" "ss" "ll" "s" "l" "s", "ss", "ss", "s",
};
enum { LEAVES_MAX = 15 };

typedef struct {
    char kind;
    uint8_t *valid;
    uint8_t *values; /* or 32-bit offsets, one more than there are rows */
    Buffer octets;
} Leaf;

typedef struct {
    int count;           /* of leaves; 0 if the column is not requested */
    uint8_t *valid;      /* of the structs, if it consists of several leaves */
    Leaf leaves[LEAVES_MAX];
    Shape shape;         /* of a VARIANT */
} Column;

typedef struct {
    PyObject_HEAD
    Column columns[COLUMNS];
    uint8_t order[COLUMNS];
    int column_count;
    int text;            /* the body must be text */
    int all_json;        /* all bodies are parsed, not only those with a content type of JSON */
    PyObject *parse;     /* octets of JSON -> None, or value and metadata of a VARIANT */
    Buffer hidden[HIDDEN_MAX]; /* annotations that are left out if there is an offset */
    int hidden_count;
    size_t rows_max, octets_max;
    size_t rows, octets;
    int busy;
    Variant variant;
} Table;

static void set_bit(uint8_t *bits, size_t at, int on) {
    uint8_t bit = (uint8_t)(1 << (at & 7));
    if (on) bits[at >> 3] |= bit;
    else bits[at >> 3] &= (uint8_t)~bit;
}

static void put_number(Leaf *leaf, size_t row, int64_t number) {
    set_bit(leaf->valid, row, 1);
    if (leaf->kind == 'l') memcpy(leaf->values + 8 * row, &number, 8);
    else if (leaf->kind == 'i') {
        int32_t narrow = (int32_t)number;
        memcpy(leaf->values + 4 * row, &narrow, 4);
    } else set_bit(leaf->values, row, (int)number);
}

/* Record the end of the row's octets, which have been appended. */
static Outcome put_end(Leaf *leaf, size_t row, int valid) {
    int32_t end = (int32_t)leaf->octets.size;
    set_bit(leaf->valid, row, valid);
    memcpy(leaf->values + 4 * (row + 1), &end, 4);
    return OK;
}

static Outcome put_octets(Leaf *leaf, size_t row, const void *octets, size_t size) {
    TRY(append(&leaf->octets, octets, size));
    return put_end(leaf, row, 1);
}

static Outcome put_cursor(Leaf *leaf, size_t row, Cursor text) {
    return put_octets(leaf, row, text.at, left(&text));
}

static Outcome put_word(Leaf *leaf, size_t row, const char *word) {
    return put_octets(leaf, row, word, strlen(word));
}

static Outcome put_null(Leaf *leaf, size_t row) {
    if (leaf->kind == 's') return put_end(leaf, row, 0);
    put_number(leaf, row, 0);
    set_bit(leaf->valid, row, 0);
    return OK;
}

static Outcome put_null_variant(Column *column, size_t row) {
    set_bit(column->valid, row, 0);
    TRY(put_end(&column->leaves[0], row, 1));
    return put_end(&column->leaves[1], row, 1);
}

static Outcome put_variant(Column *column, size_t row) {
    set_bit(column->valid, row, 1);
    TRY(put_end(&column->leaves[0], row, 1));
    return put_end(&column->leaves[1], row, 1);
}

/* --- Sections -------------------------------------------------------------------------------------- */

/* Indexes of the sections of a message; the kinds of bodies share one. */
enum { P_HEADER, P_DELIVERY, P_MESSAGE, P_PROPERTIES, P_APPLICATION, P_BODY, P_FOOTER, PLACES };

typedef struct {
    /* Each from the constructor of its value to its end; all zero if a section is absent. */
    Cursor sections[PLACES];
    const uint8_t *bare, *bare_end;
    int body_code, body_count;
    /* The data sections of the body. */
    Cursor data[SECTIONS_MAX];
} Message;

/* Constructors of Part 1 section 1.6, without those of arrays and described values. */
static int is_assigned(uint8_t constructor) {
    switch (constructor) {
    case 0x40: case 0x41: case 0x42: case 0x43: case 0x44: case 0x45:
    case 0x50: case 0x51: case 0x52: case 0x53: case 0x54: case 0x55: case 0x56:
    case 0x60: case 0x61:
    case 0x70: case 0x71: case 0x72: case 0x73: case 0x74:
    case 0x80: case 0x81: case 0x82: case 0x83: case 0x84:
    case 0x94: case 0x98:
    case 0xA0: case 0xA1: case 0xA3: case 0xB0: case 0xB1: case 0xB3:
    case 0xC0: case 0xC1: case 0xD0: case 0xD1:
        return 1;
    default: return 0;
    }
}

/* Skip the value at the cursor by its size, if a section of this descriptor may have that type. */
static Outcome skip_section(Cursor *cursor, int code) {
    if (cursor->at == cursor->end) return ODD;
    uint8_t constructor = *cursor->at++;
    int allowed;
    switch (code) {
    case 0x70: case 0x73: case 0x76:
        allowed = constructor == 0x45 || constructor == 0xC0 || constructor == 0xD0;
        break;
    case 0x75: allowed = constructor == 0xA0 || constructor == 0xB0; break;
    case 0x77: allowed = is_assigned(constructor); break;
    default: allowed = constructor == 0xC1 || constructor == 0xD1; break;
    }
    if (!allowed) return ODD;
    Cursor content;
    switch (constructor >> 4) {
    case 0x4: case 0x5: case 0x6: case 0x7: case 0x8: case 0x9: {
        static const uint8_t WIDTHS[] = {0, 1, 2, 4, 8, 16};
        return take_octets(cursor, WIDTHS[(constructor >> 4) - 4], &content);
    }
    case 0xA: case 0xC: return take_sized(cursor, 1, &content);
    case 0xB: case 0xD: return take_sized(cursor, 4, &content);
    default: return ODD;
    }
}

/* Find the sections by their sizes. */
static Outcome walk(Cursor cursor, Message *message) {
    int last = -1;
    memset(message->sections, 0, sizeof message->sections);
    message->body_code = message->body_count = 0;
    message->bare = NULL;
    message->bare_end = cursor.end;
    while (cursor.at < cursor.end) {
        const uint8_t *begin = cursor.at;
        if (left(&cursor) < 4 || begin[0] != 0x00 || begin[1] != 0x53) return ODD;
        int code = begin[2];
        if (code < 0x70 || code > 0x78) return ODD;
        cursor.at += 3;
        Cursor section = {cursor.at, NULL};
        TRY(skip_section(&cursor, code));
        section.end = cursor.at;
        int place = code == 0x78 ? P_FOOTER : code < 0x75 ? code - 0x70 : P_BODY;
        if (place > last) {
            message->sections[place] = section;
            if (place >= P_PROPERTIES && message->bare == NULL) message->bare = begin;
            if (place == P_FOOTER) message->bare_end = begin;
            if (place == P_BODY) {
                message->body_code = code;
                message->body_count = 1;
                message->data[0] = section;
            }
            last = place;
        } else if (place == P_BODY && last == P_BODY && code == message->body_code && code != 0x77) {
            if (message->body_count == SECTIONS_MAX) return ODD;
            message->data[message->body_count++] = section;
        } else return ODD;
    }
    if (message->bare == NULL) message->bare = cursor.end;
    return OK;
}

/* Open a list of at most *most* fields; an absent section is an empty list. */
static Outcome open_list(Cursor section, Cursor *fields, uint64_t *count, uint64_t most) {
    fields->at = fields->end = section.end;
    *count = 0;
    if (section.at == section.end) return OK;
    uint8_t code = *section.at++;
    if (code == 0x45) return section.at == section.end ? OK : ODD;
    TRY(take_compound(&section, code, fields, count));
    return section.at == section.end && *count <= most ? OK : ODD;
}

/* Read a uint in any of its three constructors. */
static Outcome take_uint(Cursor *fields, uint8_t code, uint64_t *number) {
    switch (code) {
    case 0x43: *number = 0; return OK;
    case 0x52: return take_number(fields, 1, number);
    case 0x70: return take_number(fields, 4, number);
    default: return ODD;
    }
}

static Outcome put_header(Column *column, size_t row, Cursor section) {
    Cursor fields;
    uint64_t count, number;
    Leaf *leaves = column->leaves;
    set_bit(column->valid, row, 1);
    TRY(open_list(section, &fields, &count, 5));
    put_number(&leaves[0], row, 0);
    put_number(&leaves[1], row, 4);
    TRY(put_null(&leaves[2], row));
    put_number(&leaves[3], row, 0);
    put_number(&leaves[4], row, 0);
    for (uint64_t i = 0; i < count; i++) {
        if (fields.at == fields.end) return ODD;
        uint8_t code = *fields.at++;
        if (code == 0x40) continue;
        switch (i) {
        case 0: case 3:
            if (code != 0x41 && code != 0x42) return ODD;
            number = code == 0x41;
            break;
        case 1:
            if (code != 0x50) return ODD;
            TRY(take_number(&fields, 1, &number));
            break;
        default: TRY(take_uint(&fields, code, &number));
        }
        put_number(&leaves[i], row, (int64_t)number);
    }
    return fields.at == fields.end ? OK : ODD;
}

static const char DIGITS[] = "0123456789abcdef";

/* Write a message-id or correlation-id as text, and the name of its type (section 3.2.11 and following). */
static Outcome put_id(Leaf *leaf, size_t row, Cursor *fields, uint8_t code) {
    Cursor found;
    switch (code) {
    case 0xA1: case 0xB1:
        fields->at--;
        TRY(take_text(fields, 1, &found));
        TRY(put_cursor(leaf, row, found));
        return put_word(leaf + 1, row, "string");
    case 0xA0: case 0xB0:
        TRY(take_sized(fields, code == 0xA0 ? 1 : 4, &found));
        TRY(reserve(&leaf->octets, 2 * left(&found)));
        for (; found.at < found.end; found.at++) {
            leaf->octets.octets[leaf->octets.size++] = (uint8_t)DIGITS[*found.at >> 4];
            leaf->octets.octets[leaf->octets.size++] = (uint8_t)DIGITS[*found.at & 15];
        }
        TRY(put_end(leaf, row, 1));
        return put_word(leaf + 1, row, "binary");
    case 0x98: {
        char text[36];
        TRY(take_octets(fields, 16, &found));
        for (int i = 0, at = 0; i < 16; i++) {
            if (i == 4 || i == 6 || i == 8 || i == 10) text[at++] = '-';
            text[at++] = DIGITS[found.at[i] >> 4];
            text[at++] = DIGITS[found.at[i] & 15];
        }
        TRY(put_octets(leaf, row, text, 36));
        return put_word(leaf + 1, row, "uuid");
    }
    case 0x44: case 0x53: case 0x80: {
        uint64_t number;
        char text[20];
        int at = 20;
        TRY(take_number(fields, code == 0x44 ? 0 : code == 0x53 ? 1 : 8, &number));
        do text[--at] = (char)('0' + number % 10);
        while (number /= 10);
        TRY(put_octets(leaf, row, text + at, (size_t)(20 - at)));
        return put_word(leaf + 1, row, "ulong");
    }
    default: return ODD;
    }
}

/* Check the properties, write them unless *column* is NULL, and find the content type. */
static Outcome put_properties(Column *column, size_t row, Cursor section, Cursor *content_type) {
    /* First leaf of each field: an id has two. */
    static const uint8_t LEAF[] = {0, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14};
    Cursor fields, found;
    uint64_t count, number;
    content_type->at = content_type->end = NULL;
    TRY(open_list(section, &fields, &count, 13));
    if (column) set_bit(column->valid, row, 1);
    for (uint64_t i = 0; i < 13; i++) {
        Leaf *leaf = column ? &column->leaves[LEAF[i]] : NULL;
        uint8_t code = 0x40;
        if (i < count) {
            if (fields.at == fields.end) return ODD;
            code = *fields.at++;
        }
        if (code == 0x40) {
            if (leaf) TRY(put_null(leaf, row));
            if (leaf && (i == 0 || i == 5)) TRY(put_null(leaf + 1, row));
            continue;
        }
        switch (i) {
        case 0: case 5: /* message-id, correlation-id */
            if (leaf) TRY(put_id(leaf, row, &fields, code));
            else TRY(scalar(&fields, code, NULL));
            break;
        case 1: /* user-id */
            if (code != 0xA0 && code != 0xB0) return ODD;
            TRY(take_sized(&fields, code == 0xA0 ? 1 : 4, &found));
            if (leaf) TRY(put_cursor(leaf, row, found));
            break;
        case 8: case 9: /* absolute-expiry-time, creation-time */
            if (code != 0x83) return ODD;
            TRY(take_number(&fields, 8, &number));
            if ((int64_t)number > INT64_MAX / 1000 || (int64_t)number < INT64_MIN / 1000) return ODD;
            if (leaf) put_number(leaf, row, (int64_t)number * 1000);
            break;
        case 11: /* group-sequence */
            TRY(take_uint(&fields, code, &number));
            if (leaf) put_number(leaf, row, (int64_t)number);
            break;
        default:
            fields.at--;
            TRY(take_text(&fields, 1, &found));
            if (leaf) TRY(put_cursor(leaf, row, found));
            if (i == 6) *content_type = found;
        }
    }
    return fields.at == fields.end ? OK : ODD;
}

/* Read a map of application properties, or of annotations. One annotation is a column of its own, and with
   *place* those with the message's position are left out, since that is in columns of its own. */
static Outcome put_map(Table *table, Column *column, size_t row, Cursor section, int annotations, int place,
                       Leaf *enqueued) {
    static const char ENQUEUED[] = "x-opt-enqueued-time";
    Variant *v = &table->variant;
    Cursor outer = section, content;
    uint64_t count = 0, seen = 0, hidden_seen = 0, number;
    int entries = 0;
    if (enqueued) TRY(put_null(enqueued, row));
    begin_value(v);
    if (outer.at < outer.end) {
        uint8_t code = *outer.at++;
        TRY(take_compound(&outer, code, &content, &count));
        if (outer.at != outer.end || count & 1) return ODD;
        TRY(spend(v, count));
        for (; count; count -= 2) {
            Cursor name;
            TRY(take_text(&content, !annotations, &name));
            if (enqueued && is_same(name, (const uint8_t *)ENQUEUED, sizeof ENQUEUED - 1)) {
                /* Null or a timestamp; duplicates are found below. */
                Cursor value = content;
                if (value.at == value.end) return ODD;
                uint8_t constructor = *value.at++;
                if (constructor == 0x83) {
                    TRY(take_number(&value, 8, &number));
                    if ((int64_t)number > INT64_MAX / 1000 || (int64_t)number < INT64_MIN / 1000) return ODD;
                    put_number(enqueued, row, (int64_t)number * 1000);
                } else if (constructor != 0x40) return ODD;
            }
            int hidden = -1;
            for (int i = 0; place && i < table->hidden_count; i++)
                if (is_same(name, table->hidden[i].octets, table->hidden[i].size)) hidden = i;
            if (hidden < 0) {
                entries++;
                TRY(gather_entry(v, &content, name, &seen, 1));
                continue;
            }
            if (hidden_seen >> hidden & 1) return ODD;
            hidden_seen |= UINT64_C(1) << hidden;
            v->keys[v->key_count++] = HIDDEN;
            if (content.at == content.end) return ODD;
            uint8_t constructor = *content.at++;
            TRY(scalar(&content, constructor, NULL));
        }
        if (content.at != content.end) return ODD;
    }
    if (column == NULL) return OK;
    if (entries == 0) return put_null_variant(column, row);
    TRY(finish_value(v, section, &column->shape, &column->leaves[0].octets, &column->leaves[1].octets));
    return put_variant(column, row);
}

/* --- Bodies ---------------------------------------------------------------------------------------- */

/* Return the content of a data section, whose size the walk has checked. */
static Cursor data_of(Cursor section) {
    section.at += *section.at == 0xA0 ? 2 : 5;
    return section;
}

static Outcome put_body(Leaf *leaf, size_t row, const Message *message, int text) {
    size_t begin = leaf->octets.size;
    if (message->body_code == 0x75) {
        for (int i = 0; i < message->body_count; i++) {
            Cursor data = data_of(message->data[i]);
            TRY(append(&leaf->octets, data.at, left(&data)));
        }
    } else {
        Cursor value = message->sections[P_BODY], found;
        /* Only a value of text or binary has octets; it has been checked before. */
        if (message->body_code != 0x77) return put_null(leaf, row);
        uint8_t code = *value.at;
        if (code == 0xA0 || code == 0xB0) {
            value.at++;
            TRY(take_sized(&value, code == 0xA0 ? 1 : 4, &found));
        } else if (code == 0xA1 || code == 0xB1 || code == 0xA3 || code == 0xB3) {
            TRY(take_text(&value, 1, &found));
        } else return put_null(leaf, row);
        if (value.at != value.end) return ODD;
        TRY(append(&leaf->octets, found.at, left(&found)));
    }
    if (text) {
        Cursor octets = {leaf->octets.octets + begin, leaf->octets.octets + leaf->octets.size};
        if (leaf->octets.size > begin && !is_utf8(octets)) return ODD;
    }
    return put_end(leaf, row, 1);
}

/* Return whether a content type ends in "json" before its parameters, as in rows.py. */
static Outcome says_json(Cursor type, int *found) {
    if (!is_ascii(type)) return ODD;
    const uint8_t *end = type.at;
    while (end < type.end && *end != ';') end++;
    while (end > type.at && (end[-1] == ' ' || (end[-1] >= 9 && end[-1] <= 13) ||
                             (end[-1] >= 0x1C && end[-1] <= 0x1F)))
        end--;
    *found = end - type.at >= 4 && memcmp(end - 4, "json", 4) == 0;
    return OK;
}

/* Append the octets of a bytes object. */
static Outcome append_bytes(Buffer *buffer, PyObject *bytes) {
    char *octets;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(bytes, &octets, &size) < 0) return RAISED;
    return append(buffer, octets, (size_t)size);
}

/* Parse JSON in Python, which handles numbers, escapes and duplicate names. */
static Outcome put_json(Table *table, Column *column, size_t row, const Message *message) {
    PyObject *octets = NULL, *parsed = NULL, *value, *metadata;
    Outcome outcome = RAISED;
    if (message->body_count == 1) {
        Cursor data = data_of(message->data[0]);
        octets = PyBytes_FromStringAndSize((const char *)data.at, (Py_ssize_t)left(&data));
    } else {
        /* Joined in the workspace of values, which is free now. */
        Buffer *joined = &table->variant.stack;
        joined->size = 0;
        for (int i = 0; i < message->body_count; i++) {
            Cursor data = data_of(message->data[i]);
            TRY(append(joined, data.at, left(&data)));
        }
        octets = PyBytes_FromStringAndSize((const char *)joined->octets, (Py_ssize_t)joined->size);
    }
    if (octets == NULL) return RAISED;
    parsed = PyObject_CallFunctionObjArgs(table->parse, octets, NULL);
    Py_DECREF(octets);
    if (parsed == NULL) {
        /* The error is reported when the caller makes the row. */
        if (!PyErr_ExceptionMatches(PyExc_ValueError)) return RAISED;
        PyErr_Clear();
        return ODD;
    }
    if (parsed == Py_None) outcome = put_null_variant(column, row);
    else if (!PyTuple_Check(parsed))
        PyErr_Format(PyExc_TypeError, "parse: None or a tuple of two bytes expected, got %R", parsed);
    else if (PyArg_ParseTuple(parsed, "SS", &value, &metadata)) {
        outcome = append_bytes(&column->leaves[0].octets, value);
        if (outcome == OK) outcome = append_bytes(&column->leaves[1].octets, metadata);
        if (outcome == OK) outcome = put_variant(column, row);
    }
    Py_DECREF(parsed);
    return outcome;
}

/* --- Rows ------------------------------------------------------------------------------------------ */

/* Node and partition of the rows. */
typedef struct {
    Cursor address;
    int has_partition;
    int64_t partition;
} Place;

/* Offset of a record in its log, and its time. */
typedef struct {
    int has_offset, has_time;
    int64_t offset, time_ms;
} Spot;

static Outcome put_row(Table *table, Cursor payload, const Place *place, Spot spot) {
    Message message;
    Column *columns = table->columns;
    size_t row = table->rows;
    Cursor content_type;
#define HAS(name) (columns[name].count != 0)
    TRY(walk(payload, &message));
    if (HAS(ADDRESS)) TRY(put_cursor(columns[ADDRESS].leaves, row, place->address));
    if (HAS(PARTITION)) {
        if (place->has_partition) put_number(columns[PARTITION].leaves, row, place->partition);
        else TRY(put_null(columns[PARTITION].leaves, row));
    }
    if (HAS(OFFSET)) {
        if (spot.has_offset) put_number(columns[OFFSET].leaves, row, spot.offset);
        else TRY(put_null(columns[OFFSET].leaves, row));
    }
    int is_value = message.body_code == 0x77;
    Cursor body = message.sections[P_BODY];
    if (is_value && (HAS(BODY) || HAS(BODY_VARIANT))) {
        Cursor value = body;
        begin_value(&table->variant);
        TRY(gather(&table->variant, &value, 0));
        if (value.at != value.end) return ODD;
    }
    if (HAS(BODY)) TRY(put_body(columns[BODY].leaves, row, &message, table->text));
    if (HAS(BODY_KIND))
        TRY(put_word(columns[BODY_KIND].leaves, row,
                     message.body_code == 0x75 ? "data"
                     : message.body_code == 0x76 ? "sequence"
                     : is_value ? "value" : "none"));
    Column *typed = HAS(BODY_VARIANT) ? &columns[BODY_VARIANT] : NULL;
    int needs_type = typed && !table->all_json && !is_value;
    if (needs_type || HAS(PROPERTIES))
        TRY(put_properties(HAS(PROPERTIES) ? &columns[PROPERTIES] : NULL, row, message.sections[P_PROPERTIES], &content_type));
    if (typed) {
        int json = table->all_json;
        if (needs_type) {
            if (message.body_code == 0x76) return ODD;
            TRY(says_json(content_type, &json));
        }
        if (table->all_json && message.body_code != 0x75) {
            /* A text or binary in a value may be JSON, too, which is rare. */
            if (is_value) return ODD;
            TRY(put_null_variant(typed, row));
        } else if (is_value) {
            TRY(finish_value(&table->variant, body, &typed->shape, &typed->leaves[0].octets,
                             &typed->leaves[1].octets));
            TRY(put_variant(typed, row));
        } else if (json && message.body_code == 0x75) TRY(put_json(table, typed, row, &message));
        else TRY(put_null_variant(typed, row));
    }
    if (HAS(HEADER)) TRY(put_header(&columns[HEADER], row, message.sections[P_HEADER]));
    if (HAS(APPLICATION_PROPERTIES))
        TRY(put_map(table, &columns[APPLICATION_PROPERTIES], row, message.sections[P_APPLICATION], 0, 0, NULL));
    Leaf *enqueued = HAS(ENQUEUED_TIME) ? columns[ENQUEUED_TIME].leaves : NULL;
    if (enqueued && spot.has_time) {
        if (spot.time_ms > INT64_MAX / 1000 || spot.time_ms < INT64_MIN / 1000) return ODD;
        put_number(enqueued, row, spot.time_ms * 1000);
        enqueued = NULL;
    }
    if (HAS(MESSAGE_ANNOTATIONS) || enqueued)
        TRY(put_map(table, HAS(MESSAGE_ANNOTATIONS) ? &columns[MESSAGE_ANNOTATIONS] : NULL, row,
                    message.sections[P_MESSAGE], 1, spot.has_offset, enqueued));
    if (HAS(MESSAGE)) {
        Cursor bare = {message.bare, message.bare_end};
        TRY(put_cursor(columns[MESSAGE].leaves, row, bare));
    }
#undef HAS
    return OK;
}

/* Remove the octets that an unfinished row has appended. */
static void roll_back(Table *table) {
    for (int i = 0; i < table->column_count; i++) {
        Column *column = &table->columns[table->order[i]];
        for (int at = 0; at < column->count; at++) {
            Leaf *leaf = &column->leaves[at];
            int32_t end;
            if (leaf->kind != 's') continue;
            memcpy(&end, leaf->values + 4 * table->rows, 4);
            leaf->octets.size = (size_t)end;
        }
    }
}

PyDoc_STRVAR(fill_doc,
"fill(payloads, start, stop, offsets, address, partition, times=None)\n--\n\n"
"Add rows of *payloads* from the index *start* on and before *stop*, as far as there is room and nothing is odd.\n\n"
"Returns the index of the first payload that was not added: the end, or that of one that is odd or for which there\n"
"is no room, which ``full`` tells. *offsets* and *times* (milliseconds since 1970, when a log got them) are lists that\n"
"are as long, or None.");

/* Read the number at *index* of a list; None has no numbers. */
static Outcome take_item(PyObject *list, Py_ssize_t index, int *has, int64_t *number) {
    *has = list != Py_None;
    if (!*has) return OK;
    PyObject *item = PyList_GetItem(list, index);
    if (item == NULL) return RAISED;
    *number = PyLong_AsLongLong(item);
    return *number == -1 && PyErr_Occurred() ? RAISED : OK;
}

static PyObject *table_fill(PyObject *self, PyObject *args) {
    Table *table = (Table *)self;
    PyObject *payloads, *offsets, *partition, *times = Py_None;
    const char *address;
    Py_ssize_t start, stop, address_size;
    Place place = {{NULL, NULL}, 0, 0};
    if (!PyArg_ParseTuple(args, "O!nnOs#O|O", &PyList_Type, &payloads, &start, &stop, &offsets,
                          &address, &address_size, &partition, &times))
        return NULL;
    place.address.at = (const uint8_t *)address;
    place.address.end = place.address.at + address_size;
    if (partition != Py_None) {
        place.has_partition = 1;
        place.partition = PyLong_AsLongLong(partition);
        if (place.partition == -1 && PyErr_Occurred()) return NULL;
        if (place.partition < INT32_MIN || place.partition > INT32_MAX)
            return PyErr_Format(PyExc_OverflowError, "partition: 32 bits expected, got %R", partition);
    }
    if ((offsets != Py_None && !PyList_Check(offsets)) || (times != Py_None && !PyList_Check(times)))
        return PyErr_Format(PyExc_TypeError, "offsets and times: a list or None expected");
    if (start < 0) return PyErr_Format(PyExc_ValueError, "start: at least 0 expected, got %zd", start);
    if (table->busy) return PyErr_Format(PyExc_RuntimeError, "the table is being filled already");
    table->busy = 1;
    int failed = 0;
    /* The lists may change while JSON is parsed in Python, so their sizes are checked each time. */
    for (; start < stop && start < PyList_Size(payloads); start++) {
        Spot spot = {0, 0, 0, 0};
        char *octets;
        Py_ssize_t size;
        if (table->rows >= table->rows_max || (table->rows && table->octets >= table->octets_max)) break;
        PyObject *payload = PyList_GetItem(payloads, start);
        if (!PyBytes_Check(payload)) break;
        /* Hold a reference while Python code runs. */
        Py_INCREF(payload);
        if (take_item(offsets, start, &spot.has_offset, &spot.offset) != OK ||
            take_item(times, start, &spot.has_time, &spot.time_ms) != OK) {
            Py_DECREF(payload);
            failed = 1;
            break;
        }
        PyBytes_AsStringAndSize(payload, &octets, &size);
        Cursor cursor = {(const uint8_t *)octets, (const uint8_t *)octets + size};
        Outcome outcome = put_row(table, cursor, &place, spot);
        Py_DECREF(payload);
        if (outcome != OK) {
            roll_back(table);
            failed = outcome == RAISED;
            break;
        }
        table->rows++;
        table->octets += (size_t)size;
    }
    table->busy = 0;
    return failed ? NULL : PyLong_FromSsize_t(start);
}

/* --- Results --------------------------------------------------------------------------------------- */

static size_t count_nulls(const uint8_t *valid, size_t rows) {
    size_t nulls = 0;
    for (size_t i = 0; i < rows; i++) nulls += !(valid[i >> 3] >> (i & 7) & 1);
    return nulls;
}

static PyObject *octets_of(const void *octets, size_t size) {
    return PyBytes_FromStringAndSize(octets, (Py_ssize_t)size);
}

/* Return the validity bits and the count of nulls; None for the bits if there are no nulls. */
static PyObject *validity_of(const uint8_t *valid, size_t rows, Py_ssize_t *nulls) {
    *nulls = (Py_ssize_t)count_nulls(valid, rows);
    if (*nulls == 0) Py_RETURN_NONE;
    return octets_of(valid, (rows + 7) / 8);
}

static PyObject *leaf_of(const Leaf *leaf, size_t rows) {
    Py_ssize_t nulls;
    PyObject *valid = validity_of(leaf->valid, rows, &nulls);
    if (valid == NULL) return NULL;
    if (leaf->kind == 's')
        return Py_BuildValue("(nNNN)", nulls, valid, octets_of(leaf->values, 4 * (rows + 1)),
                             octets_of(leaf->octets.octets, leaf->octets.size));
    size_t size = leaf->kind == 'b' ? (rows + 7) / 8 : leaf->kind == 'i' ? 4 * rows : 8 * rows;
    return Py_BuildValue("(nNN)", nulls, valid, octets_of(leaf->values, size));
}

static PyObject *column_of(const Column *column, size_t rows) {
    Py_ssize_t nulls;
    if (column->valid == NULL) return leaf_of(&column->leaves[0], rows);
    PyObject *leaves = PyList_New(column->count);
    if (leaves == NULL) return NULL;
    for (int i = 0; i < column->count; i++) {
        PyObject *leaf = leaf_of(&column->leaves[i], rows);
        if (leaf == NULL) {
            Py_DECREF(leaves);
            return NULL;
        }
        PyList_SetItem(leaves, i, leaf);
    }
    PyObject *valid = validity_of(column->valid, rows, &nulls);
    if (valid == NULL) {
        Py_DECREF(leaves);
        return NULL;
    }
    return Py_BuildValue("(nNN)", nulls, valid, leaves);
}

PyDoc_STRVAR(take_doc,
"take()\n--\n\n"
"Return the number of rows and the columns, and begin anew.\n\n"
"A column is ``(nulls, valid, values)``, for text and octets ``(nulls, valid, offsets, octets)``, and for structs\n"
"``(nulls, valid, [field, ...])``; *valid* is None if there are no nulls.");

static PyObject *table_take(PyObject *self, PyObject *Py_UNUSED(args)) {
    Table *table = (Table *)self;
    if (table->busy) return PyErr_Format(PyExc_RuntimeError, "the table is being filled");
    PyObject *columns = PyList_New(table->column_count);
    if (columns == NULL) return NULL;
    for (int i = 0; i < table->column_count; i++) {
        PyObject *column = column_of(&table->columns[table->order[i]], table->rows);
        if (column == NULL) {
            Py_DECREF(columns);
            return NULL;
        }
        PyList_SetItem(columns, i, column);
    }
    PyObject *found = Py_BuildValue("(nN)", (Py_ssize_t)table->rows, columns);
    table->rows = table->octets = 0;
    roll_back(table);
    return found;
}

/* --- Type ------------------------------------------------------------------------------------------ */

static Outcome allocate(uint8_t **found, size_t size) {
    *found = PyMem_Calloc(1, size);
    if (*found != NULL) return OK;
    PyErr_NoMemory();
    return RAISED;
}

static Outcome open_column(Table *table, int name) {
    Column *column = &table->columns[name];
    size_t rows = table->rows_max;
    int count = (int)strlen(LAYOUTS[name]);
    if (count > 1) TRY(allocate(&column->valid, (rows + 7) / 8));
    column->count = count;
    for (int i = 0; i < count; i++) {
        Leaf *leaf = &column->leaves[i];
        leaf->kind = LAYOUTS[name][i];
        TRY(allocate(&leaf->valid, (rows + 7) / 8));
        TRY(allocate(&leaf->values, 8 * (rows + 1)));
    }
    return OK;
}

static Outcome open_columns(Table *table, PyObject *names) {
    Py_ssize_t count = PySequence_Size(names);
    if (count < 0) return RAISED;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *name = PySequence_GetItem(names, i);
        if (name == NULL) return RAISED;
        int found = 0;
        while (found < COLUMNS && !(PyUnicode_Check(name) &&
                                    PyUnicode_CompareWithASCIIString(name, NAMES[found]) == 0))
            found++;
        if (found == COLUMNS || table->columns[found].count) {
            PyErr_Format(PyExc_ValueError, "columns: %R is not one, or is there twice", name);
            Py_DECREF(name);
            return RAISED;
        }
        Py_DECREF(name);
        table->order[table->column_count++] = (uint8_t)found;
        TRY(open_column(table, found));
    }
    return OK;
}

static Outcome open_hidden(Table *table, PyObject *names) {
    Py_ssize_t count = PySequence_Size(names);
    if (count < 0) return RAISED;
    if (count > HIDDEN_MAX) {
        PyErr_Format(PyExc_ValueError, "hidden: at most %d names expected, got %zd", HIDDEN_MAX, count);
        return RAISED;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *name = PySequence_GetItem(names, i);
        if (name == NULL) return RAISED;
        Outcome outcome = append_bytes(&table->hidden[table->hidden_count], name);
        Py_DECREF(name);
        TRY(outcome);
        table->hidden_count++;
    }
    return OK;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"columns", "rows", "octets", "text", "all_json", "parse", "hidden", NULL};
    PyObject *columns, *parse, *hidden;
    Py_ssize_t rows, octets;
    int text, all_json;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnnppOO", keywords, &columns, &rows, &octets, &text,
                                     &all_json, &parse, &hidden))
        return NULL;
    if (rows < 1 || rows > ROWS_MAX || octets < 1)
        return PyErr_Format(PyExc_ValueError, "rows: 1 to %d expected, got %zd", ROWS_MAX, rows);
    /* All zero, so that buffers without memory can be freed, too. */
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Table *table = (Table *)alloc(type, 0);
    if (table == NULL) return NULL;
    table->rows_max = (size_t)rows;
    table->octets_max = (size_t)octets;
    table->text = text;
    table->all_json = all_json;
    Py_INCREF(parse);
    table->parse = parse;
    if (open_columns(table, columns) == OK && open_hidden(table, hidden) == OK) return (PyObject *)table;
    Py_DECREF(table);
    return NULL;
}

static void table_dealloc(PyObject *self) {
    Table *table = (Table *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    for (int name = 0; name < COLUMNS; name++) {
        Column *column = &table->columns[name];
        PyMem_Free(column->valid);
        PyMem_Free(column->shape.octets.octets);
        PyMem_Free(column->shape.metadata.octets);
        for (int i = 0; i < LEAVES_MAX; i++) {
            PyMem_Free(column->leaves[i].valid);
            PyMem_Free(column->leaves[i].values);
            PyMem_Free(column->leaves[i].octets.octets);
        }
    }
    for (int i = 0; i < HIDDEN_MAX; i++) PyMem_Free(table->hidden[i].octets);
    PyMem_Free(table->variant.stack.octets);
    Py_CLEAR(table->parse);
    freefunc free = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free(self);
    Py_DECREF(type);
}

static int table_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Table *)self)->parse);
    return 0;
}

static int table_clear(PyObject *self) {
    Py_CLEAR(((Table *)self)->parse);
    return 0;
}

static PyObject *table_rows(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(((Table *)self)->rows);
}

static PyObject *table_full(PyObject *self, void *Py_UNUSED(closure)) {
    Table *table = (Table *)self;
    return PyBool_FromLong(table->rows >= table->rows_max ||
                           (table->rows && table->octets >= table->octets_max));
}

static PyMethodDef table_methods[] = {
    {"fill", table_fill, METH_VARARGS, fill_doc},
    {"take", table_take, METH_NOARGS, take_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef table_getset[] = {
    {"rows", table_rows, NULL, "Rows that are there.", NULL},
    {"full", table_full, NULL, "Whether there is no room for another row.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(table_doc,
"Table(columns, rows, octets, text, all_json, parse, hidden)\n--\n\n"
"Buffers of *columns*, for at most *rows* rows, and of payloads until they have *octets* together.");

static PyType_Slot table_slots[] = {
    {Py_tp_doc, (void *)table_doc},
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_traverse, table_traverse},
    {Py_tp_clear, table_clear},
    {Py_tp_methods, table_methods},
    {Py_tp_getset, table_getset},
    {0, NULL},
};

static PyType_Spec table_spec = {
    "amqp_rt_spark._columnar.Table", sizeof(Table), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, table_slots,
};

/* --- Numbers of records ------------------------------------------------------------------------------ */

/* Read the number of a record whose annotations begin with those of a log: a long or a smalllong. */
static int number_at_its_place(Cursor payload, int64_t *number) {
    static const uint8_t HEADER_BEGIN[] = {0x00, 0x53, 0x70, 0xC0};
    static const uint8_t ANNOTATIONS_BEGIN[] = {0x00, 0x53, 0x72, 0xC1};
    static const char FIRST[] = "\xA3\x0C" "x-opt-offset" "\xA1";
    static const char SECOND[] = "\xA3\x15" "x-opt-sequence-number";
    uint64_t value;
    if (left(&payload) > 4 && memcmp(payload.at, HEADER_BEGIN, 4) == 0) {
        size_t skipped = 5 + (size_t)payload.at[4];
        if (skipped > left(&payload)) return 0;
        payload.at += skipped;
    }
    if (left(&payload) < 22 || memcmp(payload.at, ANNOTATIONS_BEGIN, 4) != 0 ||
        memcmp(payload.at + 6, FIRST, sizeof FIRST - 1) != 0)
        return 0;
    payload.at += 21;
    size_t skipped = 1 + (size_t)*payload.at;
    if (skipped > left(&payload)) return 0;
    payload.at += skipped;
    if (left(&payload) < sizeof SECOND || memcmp(payload.at, SECOND, sizeof SECOND - 1) != 0) return 0;
    payload.at += sizeof SECOND - 1;
    uint8_t constructor = *payload.at++;
    if (constructor == 0x81 && take_number(&payload, 8, &value) == OK) *number = (int64_t)value;
    else if (constructor == 0x55 && take_number(&payload, 1, &value) == OK) *number = (int8_t)value;
    else return 0;
    return 1;
}

PyDoc_STRVAR(numbers_doc,
"numbers(payloads)\n--\n\n"
"Return the number of each record in its partition, None where it does not lie at its place.");

static PyObject *numbers(PyObject *Py_UNUSED(module), PyObject *payloads) {
    if (!PyList_Check(payloads)) return PyErr_Format(PyExc_TypeError, "a list of bytes expected");
    Py_ssize_t count = PyList_Size(payloads);
    PyObject *found = PyList_New(count);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        PyObject *payload = PyList_GetItem(payloads, i), *each;
        char *octets;
        Py_ssize_t size;
        int64_t number;
        if (payload == NULL || PyBytes_AsStringAndSize(payload, &octets, &size) < 0) {
            Py_CLEAR(found);
            break;
        }
        Cursor cursor = {(const uint8_t *)octets, (const uint8_t *)octets + size};
        if (number_at_its_place(cursor, &number)) each = PyLong_FromLongLong(number);
        else {
            each = Py_None;
            Py_INCREF(each);
        }
        if (each == NULL) {
            Py_CLEAR(found);
            break;
        }
        PyList_SetItem(found, i, each);
    }
    return found;
}

/* --- Batches of records ------------------------------------------------------------------------------ */

PyDoc_STRVAR(records_doc,
"records(batch)\n--\n\n"
"Return the offsets, the times and the octets of the records of a batch (amqp_rt.batches.read_records).");

/* Append a new reference, which may be NULL, to a list. */
static int push(PyObject *list, PyObject *item) {
    if (item == NULL) return -1;
    int done = PyList_Append(list, item);
    Py_DECREF(item);
    return done;
}

/* Read a malformed batch in Python, which raises a specific error. */
static PyObject *read_in_python(PyObject *batch) {
    PyObject *module = PyImport_ImportModule("amqp_rt.batches");
    if (module == NULL) return NULL;
    PyObject *found = PyObject_CallMethod(module, "read_records", "O", batch);
    Py_DECREF(module);
    return found;
}

static PyObject *records(PyObject *Py_UNUSED(module), PyObject *batch) {
    char *octets;
    Py_ssize_t size;
    int64_t last = -1;
    if (PyBytes_AsStringAndSize(batch, &octets, &size) < 0) return NULL;
    Cursor cursor = {(const uint8_t *)octets, (const uint8_t *)octets + size};
    PyObject *offsets = PyList_New(0), *times = PyList_New(0), *payloads = PyList_New(0), *found = NULL;
    int failed = offsets == NULL || times == NULL || payloads == NULL, odd = size == 0;
    while (!failed && !odd && cursor.at < cursor.end) {
        uint64_t offset, time, format, length;
        Cursor payload;
        odd = take_number(&cursor, 8, &offset) != OK || take_number(&cursor, 8, &time) != OK ||
              take_number(&cursor, 4, &format) != OK || take_number(&cursor, 4, &length) != OK ||
              take_octets(&cursor, length, &payload) != OK || (int64_t)offset <= last ||
              (int64_t)time > INT64_MAX / 1000 || (int64_t)time < -(INT64_MAX / 1000);
        if (odd) break;
        last = (int64_t)offset;
        failed = push(offsets, PyLong_FromLongLong(last)) < 0 ||
                 push(times, PyLong_FromLongLong((int64_t)time)) < 0 ||
                 push(payloads, PyBytes_FromStringAndSize((const char *)payload.at, (Py_ssize_t)length)) < 0;
    }
    if (odd) found = read_in_python(batch);
    else if (!failed) found = PyTuple_Pack(3, offsets, times, payloads);
    Py_XDECREF(offsets);
    Py_XDECREF(times);
    Py_XDECREF(payloads);
    return found;
}

/* --- Module ------------------------------------------------------------------------------------------ */

static PyMethodDef module_methods[] = {
    {"numbers", numbers, METH_O, numbers_doc},
    {"records", records, METH_O, records_doc},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &table_spec, NULL);
    if (type == NULL) return -1;
    int done = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return done;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_columnar",
    .m_doc = "Messages as columns of Arrow, compiled.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__columnar(void) { return PyModuleDef_Init(&definition); }
